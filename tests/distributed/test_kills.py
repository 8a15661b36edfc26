"""A run that is killed, in whatever way and moment, ends as if nothing had happened."""

import random

import pytest
from kill_job import KINDS, Settings, compare, finish, interrupted


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    return finish(Settings(), 2, folder, folder / "logs")


@pytest.mark.parametrize(
    ("kind", "size"), [("all", 2), ("one", 2), ("writing", 2), ("term", 1), ("usr1", 3)], ids=lambda value: str(value)
)
def test_a_killed_run_ends_like_an_uninterrupted_one(kind, size, uninterrupted, tmp_path):
    found, hits = interrupted(Settings(), tmp_path, tmp_path / "logs", [kind], [size], seed=KINDS.index(kind))
    assert hits[0][2], hits  # the blow came while it ran
    compare(found, uninterrupted, exact=size == 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_many_kills(seed, tmp_path):
    """Four blows to each of 50 runs, of all kinds, on 1 to 3 ranks, in float64 and float32."""
    draw = random.Random(seed)
    kinds = [draw.choice(KINDS) for _ in range(4)]
    same = seed % 2 == 0
    sizes = [2 if same else draw.choice((1, 2, 3)) for _ in kinds]
    settings = Settings(
        steps=30,
        save_every=draw.choice((1, 2, 5)),
        loss=draw.choice(("fastclip-v2", "fastclip-v3", "infonce")),
        precision="fp64" if seed % 4 < 2 else "fp32",
        workers=draw.choice((0, 1)),
        more=("--fsdp",) if draw.random() < 0.25 and same else (),
    )
    (tmp_path / "right").mkdir()
    right = finish(settings, 2, tmp_path / "right", tmp_path / "right" / "logs")
    found, hits = interrupted(settings, tmp_path, tmp_path / "logs", kinds, sizes, seed=seed)
    print(
        f"kills: seed {seed} {settings.loss} {settings.precision} " + " ".join(f"{k}@{n}:{h}" for k, n, h, _ in hits)
    )
    compare(found, right, exact=same, tolerance=1e-8 if settings.precision == "fp64" else 1e-5)
