"""MiniLM: a BERT of six layers that gives a sentence the mean of its last hidden states."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, INNER, LAYERS, HEADS, POSITIONS = 30522, 384, 1536, 6, 12, 512
EPS = 1e-12
PARTS = {
    "attention.self.": "",
    "attention.output.dense": "output",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "inner",
    "output.dense": "outer",
    "output.LayerNorm": "norm",
}
"""Published names within a layer, and ours."""


class Layer(nn.Module):
    """Self-attention and a perceptron, each added to its input and normalised after."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.attention_norm, self.norm = (nn.LayerNorm(WIDTH, eps=EPS) for _ in range(2))
        self.inner, self.outer = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor, known: Tensor) -> Tensor:
        count, length, _ = states.shape
        query, key, value = (
            each(states).view(count, length, HEADS, -1).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        dropout = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=known[:, None, None], dropout_p=dropout
        )
        mixed = self.output(mixed.transpose(1, 2).reshape(count, length, WIDTH))
        states = self.attention_norm(states + self.dropout(mixed))
        found = self.outer(F.gelu(self.inner(states)))
        normed: Tensor = self.norm(states + self.dropout(found))
        return normed


class MiniLM(nn.Module):
    """Features (N, 384) of sentences as token ids (N, 1, 1, L), of which 0 is padding.

    22.6 million parameters. The ids come as floating point, like the images of other networks.
    """

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(POSITIONS, WIDTH)
        self.kinds = nn.Embedding(2, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=EPS)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(LAYERS))

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.flatten(1).long()
        # Of a sentence without a token the first place counts: no attention is over nothing.
        known = tokens != 0
        known[:, 0] = True
        embedded = self.words(tokens) + self.places.weight[: tokens.shape[1]] + self.kinds.weight[0]
        states = self.dropout(self.norm(embedded))
        for layer in self.layers:
            states = layer(states, known)
        weights = known[:, :, None].to(states)
        mean: Tensor = (states * weights).sum(1) / weights.sum(1)
        return mean


def renamed(published: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The published state without its pooler, by the names of :class:`MiniLM`."""
    embeddings = {
        "embeddings.word_embeddings": "words",
        "embeddings.position_embeddings": "places",
        "embeddings.token_type_embeddings": "kinds",
        "embeddings.LayerNorm": "norm",
    }
    found = {}
    for name, tensor in published.items():
        if name.startswith("pooler.") or name.endswith("position_ids"):
            continue
        for theirs, ours in (embeddings if name.startswith("embeddings") else PARTS).items():
            if theirs in name:
                name = (
                    name.replace(theirs, ours).removeprefix("encoder.").replace("layer.", "layers.")
                )
                break
        found[name] = tensor.contiguous()
    return found
