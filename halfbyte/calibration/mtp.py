"""The multi-token prediction (MTP) layer: a decoder layer fed with the next token's embedding.

transformers neither loads nor runs it. Its input at position t is
`eh_proj([enorm(embed(token t+1)), hnorm(hidden t)])`, where hidden is the target model's output
after its final norm (DeepSeek-V3 report, 2412.19437, section 2.2; GLM keeps the form).
"""

from __future__ import annotations

import torch

from halfbyte.calibration.runner import LayerRunner, State, batches


@torch.no_grad()
def mtp_input(
    runner: LayerRunner, index: int, state: State, tokens: torch.Tensor, depth: int
) -> State:
    """State before the decoder layer of MTP layer `index`, one position shorter than `state`, whose
    place it takes.

    `tokens` int64 [sequences, length] are those the model was run on; `depth` 0 is the first MTP
    layer, which reads the final norm's output, deeper ones read the layer before them.
    """
    name = f"model.layers.{index}."
    prefix = runner.architecture.prefix
    table = runner.read(prefix + "model.embed_tokens.weight")
    eh_proj = runner.read(f"{prefix}{name}eh_proj.weight")
    enorm, hnorm = runner.norm(name + "enorm.weight"), runner.norm(name + "hnorm.weight")
    final_norm = runner.norm("model.norm.weight") if depth == 0 else torch.nn.Identity()
    count, length = state.hidden.shape[0], state.hidden.shape[1] - 1
    out = state.hidden.shrunk((count, length, state.hidden.shape[2]))
    for rows in batches(count, length):
        following = tokens[rows, depth + 1 : depth + 1 + length].to(runner.device)
        embedded = torch.nn.functional.embedding(following, table)
        hidden = final_norm(state.hidden[rows][:, :length])
        out[rows] = torch.cat([enorm(embedded), hnorm(hidden)], -1) @ eh_proj.T
    return State(out)
