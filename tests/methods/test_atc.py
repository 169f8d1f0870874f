"""ATC against a naive clustering, written from the paper, and against SciPy's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer

from configs import first
from conftest import SMALL, make, photos_for
from reference import check_equal_tokens, check_whole, cosine, first_half
from tntprune import ATC, UsageError, UserError, macs, reduce_
from tntprune.backbones.attach import reduction_of
from tntprune.methods.atc import AgglomerativeClustering, clusters
from tntprune.methods.base import Layout
from tntprune.methods.steps import Place, Step
from tntprune.ops.tokens import start

LINKAGES = {"complete": max, "average": lambda found: sum(found) / len(found), "single": min}


def groups(features, count, linkage):
    """Clusters of one image's tokens, each a list of positions: again and again the two that are closest become one."""
    found = [[i] for i in range(len(features))]
    far = {(i, j): 1 - cosine(features[i], features[j]) for i in range(len(features)) for j in range(i)}
    while len(found) > count:
        pairs = [(a, b) for b in range(len(found)) for a in range(b)]
        distance = {
            (a, b): LINKAGES[linkage]([far[max(i, j), min(i, j)] for i in found[a] for j in found[b]]) for a, b in pairs
        }
        a, b = min(pairs, key=lambda pair: distance[pair])
        found[a] = sorted(found[a] + found.pop(b))
    return sorted(found)


def naive(model, image, config):
    """Logits of one image, and after each block where tokens go, for each patch the place of the token it is in."""
    method, prefix = reduction_of(model), model.num_prefix_tokens
    leaving = {step.place: step.leaving for step in method.steps(method.layout.patches)}
    x, carriers = model.embed(image[None])[0], {}
    places = list(range(x.shape[1] - prefix))
    patches = [[i] for i in places]
    for number, _ in enumerate(model.blocks, 1):
        sizes = torch.tensor([1.0] * prefix + [float(len(p)) for p in patches])
        x, heads = first_half(model, number, x, bias=sizes.log()[None, None, None] if config.proportional else None)
        for place in (Place(number, True), Place(number)):
            if not place.inside:
                x = model.opened(number).mlp_half(x)
            if place in leaving:
                key, own = heads.key[0, :, prefix:], x[0, prefix:]
                features = {"x": own, "mean": key.mean(0), "concat": key.transpose(0, 1).flatten(1)}[config.metric]
                found = groups(features, leaving[place], config.linkage)
                merged = [sum(own[i] * len(patches[i]) for i in g) / sum(len(patches[i]) for i in g) for g in found]
                if config.average == "mlerp":
                    longest = [max(own[i].norm() for i in g) for g in found]
                    merged = [m if len(g) == 1 else m * n / m.norm() for m, n, g in zip(merged, longest, found)]
                x = torch.cat([x[0, :prefix], torch.stack(merged)])[None]
                places = [places[g[0]] for g in found]
                patches = [sorted(p for i in g for p in patches[i]) for g in found]
                carrier = {p: place for own, place in zip(patches, places) for p in own}
                carriers[number] = [carrier[p] for p in range(len(carrier))]
    x = model.norm(x)
    if model.global_pool == "token":
        return model.forward_head(x)[0], carriers
    total = sum(x[0, prefix + i] * len(p) for i, p in enumerate(patches))
    return model.head(model.fc_norm(total / sum(map(len, patches)))), carriers


WHOLE = {
    "as published": ATC(at=(2, 3, 4), keep=0.8),
    "average": ATC(at=(2, 4), keep=0.7, linkage="average"),
    "single": ATC(at=(2, 4), r=(20, 3), linkage="single"),
    "after": ATC(at=(1, 4), r=9, inside=False, metric="concat"),
    "norms": ATC(at=(2, 4), keep=0.6, average="mlerp"),
    "tokens": ATC(at=(2, 3), r=11, metric="x", proportional=False),
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("kind", first(("plain", "distilled", "registers", "avg_with_cls"), ("plain",)))
def test_whole_models_equal_the_loops(kind, name):
    model = reduce_(make(kind), WHOLE[name])
    images = photos_for(model, 1)
    with torch.inference_mode():
        expected = [naive(model, image, WHOLE[name]) for image in images]
    check_whole(model, images, expected)


def distances(count, n, seed):
    x = torch.nn.functional.normalize(torch.randn(count, n, 8, generator=torch.Generator().manual_seed(seed)), dim=2)
    return 1 - x @ x.transpose(1, 2)


def sets(labels):
    return {frozenset(i for i, own in enumerate(labels) if own == label) for label in labels}


@settings(max_examples=40, deadline=None)
@given(n=st.integers(2, 60), linkage=st.sampled_from(list(LINKAGES)), seed=st.integers(0, 999), data=st.data())
def test_clusters_are_scipys(n, linkage, seed, data):
    hierarchy = pytest.importorskip("scipy.cluster.hierarchy")
    mergers, table = data.draw(st.integers(0, n - 1)), distances(3, n, seed)
    found = clusters(table, mergers, linkage)
    for b in range(3):
        tree = hierarchy.linkage(table[b][tuple(torch.triu_indices(n, n, 1))].numpy(), linkage)
        expected = hierarchy.fcluster(tree, n - mergers, "maxclust").tolist()
        assert sets(found[b].tolist()) == sets(expected)
        assert all(min(own) == found[b, i] for own in sets(found[b].tolist()) for i in own)


def test_of_equal_distances_the_first_counts_as_the_smallest():
    """Whatever the device: no tie is left to chance, and an image does not depend on the others."""
    table = torch.ones(2, 6, 6)
    table[1, 3, 5] = 0.5
    found = clusters(table, 2, "complete")
    assert found.tolist() == [[0, 0, 0, 3, 4, 5], [0, 0, 2, 3, 4, 3]]
    torch.testing.assert_close(clusters(table[1:], 2, "complete"), found[1:])


def method_for(config, prefix, patches):
    layout = Layout("test", 6, 6, prefix, (1, patches), cls=prefix > 0, heads=2, attn_dim=6, opens=True)
    return AgglomerativeClustering(config, layout)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(2, 12), prefix=st.integers(0, 5), seed=st.integers(0, 999), data=st.data())
def test_one_step_equals_the_loops(n, prefix, seed, data):
    leaving, linkage = data.draw(st.integers(1, n - 1)), data.draw(st.sampled_from(list(LINKAGES)))
    tokens = start(torch.randn(2, prefix + n, 6, generator=torch.Generator().manual_seed(seed)), prefix, follow=True)
    method = method_for(ATC(at=1, tokens=leaving, metric="x", linkage=linkage), prefix, n)
    found = method(tokens, Step(Place(1, True), n, leaving, leaving))
    assert torch.equal(found.x[:, :prefix], tokens.x[:, :prefix])
    for b in range(2):
        expected = groups(tokens.patches[b], leaving, linkage)
        means = torch.stack([tokens.patches[b, own].mean(0) for own in expected])
        torch.testing.assert_close(found.patches[b], means, atol=1e-5, rtol=1e-5)
        assert found.index[b].tolist() == [own[0] for own in expected]
        assert found.size[b].tolist() == [len(own) for own in expected]
        for position, own in enumerate(expected):
            assert (found.carrier[b] == position).nonzero().flatten().tolist() == own


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("kind", ["plain", "avg_with_cls", "no_cls", "map_pool"])
def test_equal_tokens_merge_without_a_trace(kind, linkage):
    """A token of size s counts like s equal ones: an image of equal patches comes out as if nothing was merged."""
    check_equal_tokens(make(kind), ATC(at=(2, 4), keep=0.6, linkage=linkage))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_are_exact_and_the_precision_stays(dtype):
    model = reduce_(make("plain"), ATC(at=(2, 4), keep=0.3)).to(dtype)
    seen = []
    reduction_of(model).register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.inference_mode():
        assert model(photos_for(model).to(dtype)).isfinite().all()
    assert [tokens.count for tokens in seen] == [19, 5]
    assert all(tokens.x.dtype == dtype and tokens.size.sum(1).tolist() == [64] * 3 for tokens in seen)


def test_autocast_does_not_touch_the_distances():
    tokens = start(torch.randn(2, 9, 6), 1)
    step = Step(Place(1, True), 8, 5, 5)
    method = method_for(ATC(at=1, r=3, metric="x", linkage="average"), 1, 8)
    exact = method(tokens, step)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(method(tokens, step).x, exact.x)


def test_gradients_flow_to_every_token():
    tokens = start(torch.randn(2, 9, 6, requires_grad=True), 1)
    found = method_for(ATC(at=1, r=5, metric="x"), 1, 8)(tokens, Step(Place(1, True), 8, 3, 3))
    found.x.square().sum().backward()
    assert (tokens.x.grad.abs().sum(2) > 0).all()


def test_how_many_stay():
    def left(config):
        return [step.leaving for step in reduction_of(reduce_(make("plain"), config)).steps(64)]

    assert left(ATC(at=(2, 4))) == [44, 30]  # 0.7 of those that arrive
    assert left(ATC(at=(2, 4), r=50)) == [14, 1]  # more than half, and one stays
    assert left(ATC(at=(1, 2, 3), r=4, decreasing=True)) == [56, 52]
    assert left(ATC(at=range(1, 7), tokens=(60, 50, 40, 30, 20, 10))) == [60, 50, 40, 30, 20, 10]
    assert ATC().locations == (4, 7, 10) and ATC().linkage == "complete"


def test_costs_are_those_of_the_distances_and_of_one_sum_for_each_token():
    model = make("plain")  # 64 patches, 4 heads of 8, width 32
    for metric, width in (("mean", 8), ("concat", 32), ("x", 32)):
        found = macs(reduce_(model, ATC(at=3, r=9, metric=metric)))
        assert found.reduction == {3: 64 * 64 * width + 9 * 32}
        assert found.mlp_tokens == [64, 64, 55, 55, 55, 55]
    assert macs(reduce_(model, ATC(at=3, r=9, linkage="average"))).reduction == {3: 64 * 64 * 8 + 9 * (2 * 64 + 32)}


def test_blocks_that_do_not_open_say_what_would_do():
    model = VisionTransformer(**SMALL, block_fn=ParallelScalingBlock).eval()
    images = photos_for(model)
    with pytest.raises(UserError, match=r"atc cannot be applied here: .*inside=False, metric='x', proportional=False"):
        reduce_(model, ATC(at=2))
    with torch.inference_mode():
        before = model(images)
        after = reduce_(model, ATC(at=2, inside=False, metric="x", proportional=False))(images)
    assert after.isfinite().all() and not torch.equal(after, before)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"at": None}, "at=None: expected at least one block"),
        ({"at": 0}, "at=0: no block has been seen whose keys"),
        ({"linkage": "ward"}, "linkage='ward': expected 'complete' or 'average' or 'single'"),
        ({"r": 8, "keep": 0.5}, "r was given with keep or tokens"),
        ({"decreasing": True}, "decreasing=True: expected one value of r"),
    ],
)
def test_bad_options_say_what_is_expected(given, word):
    with pytest.raises(UsageError) as caught:
        ATC(**given)
    assert word in str(caught.value)
