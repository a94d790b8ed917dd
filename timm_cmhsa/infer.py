"""Which model tensors are of, by their names and shapes alone."""
import math
from typing import Any, Dict, List, Mapping, Tuple

import torch
from timm.layers import to_2tuple

NOT_IN_TENSORS = ['img_size', 'global_pool', 'act_layer']


def infer_model(tensors: Mapping[str, torch.Tensor]) -> Tuple[str, Dict[str, Any], List[str]]:
    """Return the kind of a model, the arguments that its tensors give, and the names of those that they do not."""
    is_depthwise = 'blocks.0.mlp.conv.conv.weight' in tensors
    hidden_dim, dim, *_ = tensors[f'blocks.0.mlp.fc1{".conv" if is_depthwise else ""}.weight'].shape
    args: Dict[str, Any] = {
        'mlp_layer': 'depthwise' if is_depthwise else 'mlp',
        'depth': len({name.split('.')[1] for name in tensors if name.startswith('blocks.')}),
        'mlp_ratio': next(ratio for ratio in (hidden_dim / dim, math.nextafter(hidden_dim / dim, math.inf))
                          if int(dim * ratio) == hidden_dim),  # timm multiplies and rounds down
        'init_values': 1e-5 if 'blocks.0.ls1.gamma' in tensors else None,
        'fc_norm': 'fc_norm.weight' in tensors,
        'hidden_chans': dim,  # with patches of one token
    }
    stem = {int(name.split('.')[2]): tensor.shape for name, tensor in tensors.items()
            if name.startswith('patch_embed.proj.') and name.count('.') == 3 and name.endswith('.weight')}
    convs = {i: shape for i, shape in stem.items() if len(shape) == 4}
    if convs:  # a pooling has no tensors, only a place in the order
        text = '-'.join(f'{shape[0]}{"" if i + 1 in stem else "p"}' for i, shape in sorted(convs.items()))
        args.update(stem=text, patch_size=2 ** text.count('p'), in_chans=convs[0][1])

    attn = {name.removeprefix('blocks.0.attn.'): tensor for name, tensor in tensors.items()}
    if 'conv.weight' in attn:  # phase 1
        chans, _, *kernel_size = attn['conv.weight'].shape
        if not convs:
            args.update(patch_size=math.isqrt(dim // chans), in_chans=min(chans, 3))
        args.update(hidden_chans=chans, kernel_size=tuple(kernel_size))
        kind = 'cmhsa_conv_k5' if kernel_size == [5, 5] else 'cmhsa_conv_k3'
        return kind, args, [*NOT_IN_TENSORS, *([] if convs else ['patch_size', 'in_chans'])]

    if not convs:
        _, in_chans, *patch_size = tensors['patch_embed.proj.weight'].shape
        args.update(patch_size=tuple(patch_size), in_chans=in_chans, hidden_chans=dim // math.prod(patch_size))
    num_heads, = attn['rel_pos.zero_key_bias'].shape
    head_dim = attn['proj.weight'].shape[1] // num_heads
    args.update(
        num_heads=num_heads, head_dim=head_dim, rel_pos='table', qkv_bias='qkv.bias' in attn,
        qk_dim=(len(attn['qkv.weight']) // num_heads - head_dim) // 2)
    kind, ring = 'cmhsa_attn', (0, 0)
    if 'rel_pos.bias_scale' in attn:
        height, width = map(int, attn['rel_pos.padding_size'].tolist())
        kind, ring = 'cmhsa_attn_soft', (height, width)
        args.update(rel_pos='padded_table', padding=ring)
    side = (math.isqrt(len(attn['rel_pos.relative_position_bias_table']) - 1) + 2 - sum(ring)) // 2  # of a square grid
    args.update(img_size=tuple(side * patch for patch in to_2tuple(args['patch_size'])))
    return kind, args, NOT_IN_TENSORS
