"""Naive references of methods that merge pairs of tokens: loops over images and tokens, written from their papers."""

from __future__ import annotations

import math

import torch


class Token:
    """One patch token of the reference: its vector, what is compared of it, and the patches it stands for."""

    def __init__(self, x, feature, place, patches):
        self.x, self.feature, self.place, self.patches = x, feature, place, patches


def cosine(a, b):
    return sum(p * q for p, q in zip(a, b)) / math.sqrt(sum(p * p for p in a) * sum(q * q for q in b))


def norm(a):
    return math.sqrt(sum(float(p) ** 2 for p in a))


def mean(members, name):
    total = sum(len(m.patches) for m in members)
    return sum(getattr(m, name) * len(m.patches) for m in members) / total


def joined(first, others, average):
    """One token that takes others in."""
    members = [first, *others]
    x, feature = mean(members, "x"), mean(members, "feature")
    if average == "mlerp" and others:
        x = x * max(norm(m.x) for m in members) / norm(x)
    if average == "none":
        x, feature = first.x, first.feature
    return Token(x, feature, first.place, sorted(p for m in members for p in m.patches))


def best_matches(group_a, group_b):
    """For each token of A the cosine and the number of the most similar one of B."""
    numbers, edges = [b.feature.tolist() for b in group_b], []
    for a in group_a:
        own = a.feature.tolist()
        likeness = [cosine(own, other) for other in numbers]
        best = max(range(len(group_b)), key=lambda j: likeness[j])
        edges.append((likeness[best], a, best))
    return edges


def merged(tokens, r, prefix, average="mean", margin=None):
    """One pass of ToMe over one image: positions count the prefix tokens, even ones are A and odd ones B.

    With a margin, one pass of PiToMe.
    """
    if margin is not None:
        return merged_by_energy(tokens, r, average, margin)
    group_a = [t for i, t in enumerate(tokens) if (prefix + i) % 2 == 0]
    group_b = [t for i, t in enumerate(tokens) if (prefix + i) % 2 == 1]
    edges = best_matches(group_a, group_b)
    edges.sort(key=lambda edge: -edge[0])
    gone = edges[: min(r, len(tokens) // 2)]  # the sequence without what is protected
    alone = [a for a in group_a if all(a is not edge[1] for edge in gone)]
    return alone + [joined(b, [a for _, a, best in gone if best == j], average) for j, b in enumerate(group_b)]


def merged_by_energy(tokens, k, average, margin):
    """One pass of PiToMe over one image."""
    k = min(k, len(tokens) // 2)
    features = [t.feature.tolist() for t in tokens]
    energies = []
    for own in features:
        likeness = [cosine(own, other) for other in features]
        energies.append(sum(c if c >= margin else math.exp(c - margin) - 1 for c in likeness) / len(tokens))
    ranked = sorted(range(len(tokens)), key=lambda i: -energies[i])
    group_a, group_b = ([tokens[i] for i in ranked[first : 2 * k : 2]] for first in (0, 1))
    gone = best_matches(group_a, group_b)
    protected = [tokens[i] for i in sorted(ranked[2 * k :])]
    return protected + [joined(b, [a for _, a, best in gone if best == j], average) for j, b in enumerate(group_b)]


def merged_to(tokens, leaving, prefix, average="mean", margin=None):
    """As many passes as it takes."""
    while len(tokens) > leaving:
        tokens = merged(tokens, len(tokens) - leaving, prefix, average, margin)
    return tokens


def feature_of(key, x, metric):
    """What is compared of one token; its keys are (heads, head_dim)."""
    if metric == "x":
        return x
    return sum(key) / len(key) if metric == "mean" else torch.cat(list(key))


def naive(model, image, config, r, averages=None, margins=None):
    """Logits of one image, and after each block where tokens go, for each patch the place of the token it is in.

    Args:
        model: A timm model.
        image: (3, H, W).
        config: ToMe's, or of a method that has its options.
        r: Tokens that go by block, where the config has `r`.
        averages: What a merged token is, by block; None is what the config says.
        margins: PiToMe's, by block.
    """
    prefix = model.num_prefix_tokens
    x = model.norm_pre(model._pos_embed(model.patch_embed(image[None])))[0]
    patches = [[i] for i in range(len(x) - prefix)]
    places = list(range(len(x) - prefix))
    carriers = {}

    def reduced(x, keys, number):
        tokens = [
            Token(x[prefix + i], feature_of(keys[prefix + i], x[prefix + i], config.metric), places[i], patches[i])
            for i in range(len(places))
        ]
        how = (config.average if averages is None else averages[number], margins and margins[number])
        if config.r is not None:
            tokens = merged(tokens, r[number], prefix, *how)
        else:
            tokens = merged_to(tokens, max(1, int(len(tokens) * config.keep[0] + 1e-9)), prefix, *how)
        places[:], patches[:] = [t.place for t in tokens], [t.patches for t in tokens]
        carrier = {p: t.place for t in tokens for p in t.patches}
        carriers[number] = [carrier[p] for p in range(len(carrier))]
        return torch.stack([*x[:prefix], *[t.x for t in tokens]])

    for number, block in enumerate(model.blocks, 1):
        attn = block.attn
        qkv = attn.qkv(block.norm1(x)).view(len(x), 3, attn.num_heads, attn.head_dim)
        query, keys, value = attn.q_norm(qkv[:, 0]), attn.k_norm(qkv[:, 1]), qkv[:, 2]
        sizes = torch.tensor([1.0] * prefix + [float(len(p)) for p in patches])
        heads = []
        for head in range(attn.num_heads):
            logits = query[:, head] @ keys[:, head].T * attn.scale
            if config.proportional:
                logits = logits + sizes.log()
            heads.append(logits.softmax(1) @ value[:, head])
        x = x + block.ls1(attn.proj(attn.norm(torch.cat(heads, 1))))
        acts = number in (r if config.r is not None else config.at)
        if acts and config.inside:
            x = reduced(x, keys, number)
        x = x + block.ls2(block.mlp(block.norm2(x)))
        if acts and not config.inside:
            x = reduced(x, keys, number)
    x = model.norm(x)
    if model.global_pool == "token":
        return model.forward_head(x[None])[0], carriers
    total = sum(x[prefix + i] * len(p) for i, p in enumerate(patches))
    return model.head(model.fc_norm(total / sum(map(len, patches)))), carriers
