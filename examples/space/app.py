"""The demo as a Space of the Hugging Face Hub: put the names of your models here."""
from timm_cmhsa.demo import main

raise SystemExit(main(['hf-hub:USER/NAME', '--before', 'hf-hub:USER/NAME-converted', '--host', '0.0.0.0']))
