"""Noise comes from the operating system, each stream from enough secret bits, and nothing that is written tells."""

import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from scipy import stats
from tiny import TASK
from watchers import AfterRound

import dovetail
from dovetail import experiment, pages
from dovetail.engine.chunks import ESTIMATE
from dovetail.experiment import config
from dovetail.mechanisms import _words
from dovetail.mechanisms.gaussian import normal
from dovetail.randomness import ROOT_BYTES, Randomness, chacha

ROOT = bytes(range(32))
ALPHA = 1e-4


def key_of(randomness):
    return randomness.key_from_words(jnp.asarray(randomness.key_data))


@pytest.mark.parametrize(("counter", "number", "use"), [(0, 0, 0), (7, 0, 1), (2**32 - 3, 5, 2), (1, 2**32 - 1, 0)])
def test_blocks_are_those_of_chacha20(counter, number, use):
    """With 20 rounds, against another implementation; runs use 12 of the same rounds."""
    start = [counter.to_bytes(4, "little"), number.to_bytes(4, "little"), use.to_bytes(4, "little"), bytes(4)]
    cipher = Cipher(algorithms.ChaCha20(ROOT, b"".join(start)), mode=None)
    expected = np.frombuffer(cipher.encryptor().update(bytes(64)), "<u4")[0]
    key = jnp.asarray(np.frombuffer(ROOT, "<u4"))
    word = chacha.first_word(key, jnp.uint32(counter), jnp.uint32(number), np.uint32(use), rounds=20)
    assert int(word) == expected


def test_keys_split_fold_and_stream_apart():
    key = key_of(Randomness(0, ROOT))
    made = [key, *jax.random.split(key, 5), *(jax.random.fold_in(key, number) for number in range(5))]
    words = {tuple(np.asarray(jax.random.bits(one, (4,))).tolist()) for one in made}
    assert len(words) == len(made)
    assert jax.random.key_data(made[1]).shape == (chacha.KEY_WORDS,)


@pytest.mark.parametrize("bit", [0, 63, 64, 127, 128, 255])
def test_every_bit_of_the_root_matters(bit):
    other = bytearray(ROOT)
    other[bit // 8] ^= 1 << bit % 8
    one, two = Randomness(0, ROOT), Randomness(0, bytes(other))
    assert not np.array_equal(*(jax.random.bits(key_of(randomness), (8,)) for randomness in (one, two)))
    assert one.secret_generator(3, 1).random() != two.secret_generator(3, 1).random()
    assert one.public_generator(3, 1).random() == two.public_generator(3, 1).random()


@pytest.mark.parametrize("read", ["stream", "stored", "blocks"])
def test_words_are_uniform(read):
    """Chi-square over bytes, and over pairs of neighbouring bits; alpha 1e-4 each."""
    draws = {
        "stream": _words.random_words,
        "stored": lambda key, count: _words.random_words(key, count, stored=True),
        "blocks": lambda key, count: jax.random.bits(key, (count,)),
    }
    words = np.asarray(draws[read](key_of(Randomness(0, ROOT)), 200_000))
    counts = np.bincount(words.view(np.uint8), minlength=256)
    assert stats.chisquare(counts).pvalue > ALPHA
    pairs = np.bincount((words[:-1] & 1) * 2 + (words[1:] & 1), minlength=4)
    assert stats.chisquare(pairs).pvalue > ALPHA


def test_words_depend_on_their_key_alone_and_not_on_how_they_are_read():
    keys = jax.random.split(key_of(Randomness(0, ROOT)), 3)
    drawn = np.stack([_words.random_words(key, 5) for key in keys])
    np.testing.assert_array_equal(_words.random_words(keys, 5), drawn)
    np.testing.assert_array_equal(_words.random_words(keys, 5, stored=True), drawn)
    np.testing.assert_array_equal(_words.random_words(keys, 9)[:, :5], drawn)
    blocks = jax.vmap(lambda key: jax.random.bits(key, (40,)))(keys)
    pages = [np.asarray(_words.random_page(keys[0], number, 1024)) for number in (0, 1)]
    every = np.concatenate([drawn.ravel(), np.ravel(blocks), *pages])
    assert len(np.unique(every)) == 15 + 120 + 2048, "no word comes twice"


def test_pages_are_whole_blocks_of_chacha20_and_large_draws_are_made_of_them():
    """With 20 rounds, against another implementation; block by block, their first words first."""
    key, number, blocks = jnp.asarray(np.frombuffer(ROOT, "<u4")), 5, 3
    expected = []
    for counter in range(blocks):
        start = b"".join(part.to_bytes(4, "little") for part in (counter, number, 4, 0))
        cipher = Cipher(algorithms.ChaCha20(ROOT, start), mode=None)
        expected.append(np.frombuffer(cipher.encryptor().update(bytes(64)), "<u4"))
    np.testing.assert_array_equal(
        chacha.stream_page(key, np.uint32(number), blocks, rounds=20), np.ravel(expected, order="F")
    )
    key, count = key_of(Randomness(0, ROOT)), _words.PAGE + 1000
    words = np.asarray(_words.random_words(key, count, stored=True))
    half = 16 * -(-count // 32)
    np.testing.assert_array_equal(words[:half], _words.random_page(key, 0, half))
    np.testing.assert_array_equal(words[half:], _words.random_page(key, 1, half)[: count - half])


def test_only_our_own_keys_draw_on_pages_and_on_as_few_as_hold_the_words():
    ours, jaxs = key_of(Randomness(0, ROOT)), jax.random.key(0)
    counts = (0, 1, _words.PAGE, _words.PAGE + 1, 5 * _words.PAGE)
    assert [_words.num_pages(ours, count) for count in counts] == [1, 1, 1, 2, 5]
    assert [_words.num_pages(jaxs, count) for count in counts] == [1] * 5


def test_roots_are_fresh_hidden_and_whole():
    one, two = Randomness.from_os(1), Randomness.from_os(1)
    assert one.root != two.root
    assert len(one.root) == ROOT_BYTES == 32
    assert one.root.hex() not in repr(one)
    with pytest.raises(ValueError, match="expected a root of 32 bytes, got 8"):
        Randomness(0, bytes(8))


BASE = {
    "task": {"name": "tiny"},
    "cohort": {"kind": "everyone", "rounds": 1},
    "server": {"learning_rate": 1.0},
    "protocol": {"name": "dp_fl", "clip_norm": 1.0},
    "privacy": {"eps": 0.1, "delta": 1e-5},
}


def plan(*overrides, task=TASK):
    return experiment.prepare(config.parse(BASE, overrides), task=task)


def drawing(ready):
    """The plan with noise and samples, as a run has them."""
    return ready.with_randomness(Randomness.from_os(ready.config.seed))


def test_a_plan_has_no_noise_before_it_is_run():
    ready = plan()
    with pytest.raises(ValueError, match="draws no noise before it is run"):
        ready.step(ready.engine.start(), 0, np.arange(300))
    assert not ready.sampler.schedule.randomness.is_reproducible


def test_by_default_noise_is_fresh_and_samples_are_secret():
    ready = plan()
    one, two = (experiment.run(ready) for _ in range(2))
    assert not np.allclose(one.parameters["params"], two.parameters["params"])
    sampled = [("cohort.kind", "fixed"), ("cohort.size", 50), ("protocol.noise_multiplier", 1.0)]
    first, second = (drawing(plan(*sampled, ("privacy", {}))).sampler.schedule.draw_users(0) for _ in range(2))
    assert not np.array_equal(first, second), "the seed is public, and a sample that amplifies is not"
    batches = [("cohort.kind", "disjoint"), ("cohort.size", 50), ("protocol.noise_multiplier", 1.0)]
    first, second = (drawing(plan(*batches, ("privacy", {}))).sampler.schedule.draw_users(0) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_the_root_is_in_no_compiled_program(monkeypatch):
    """A cache of programs on disk would keep it."""
    root = np.random.default_rng(0).bytes(ROOT_BYTES)
    monkeypatch.setattr("secrets.token_bytes", lambda count: root)
    ready = plan()
    texts = []
    compiled = ready.engine._compiled

    def spying(*arguments):
        texts.append(compiled.lower(*arguments).as_text())
        return compiled(*arguments)

    ready.engine._compiled = spying
    experiment.run(ready)
    words = [str(word) for word in np.frombuffer(root, "<u4").tolist() if word > 10**6]
    assert len(words) > 4
    assert all(word not in texts[0] for word in words)


def noise_of_seeds(seeds, std, dim):
    """What one round of `dp_fl` would add to a sum under each seed."""

    def one(seed):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 0), ESTIMATE)
        return std * normal(key, (dim,))

    return np.asarray(jax.jit(jax.vmap(one))(seeds))


@pytest.mark.parametrize("noise", ["os", "seeded"])
def test_what_is_handed_out_does_not_tell_the_noise(tmp_path, noise):
    """The attack: take away the noise of the seed that is printed, or of every seed of a window, and look which world
    is left. It finds a reproducible run, so it can find one; a run of the operating system it does not."""
    seed, window, out = 1234, 4096, tmp_path / "run"
    ready = plan(("seed", seed), ("noise", noise))
    result = experiment.run(ready, out=out)
    page = pages.write(out).read_text()
    assert f"seed = {seed}" in (out / "config.toml").read_text()

    start = ready.engine.first
    released = (np.load(out / "model.npz")["params"].ravel() - start) * ready.sampler.schedule.size
    quiet = experiment.run(plan(("seed", seed), ("protocol.noise_multiplier", 1e-9), ("privacy", {})))
    truth = (quiet.parameters["params"].ravel() - start) * ready.sampler.schedule.size
    worlds = {"as it is": truth, "one user less": truth - truth / np.linalg.norm(truth)}

    noises = noise_of_seeds(jnp.arange(window), ready.sampler.protocol.std, len(truth))
    left = {world: np.abs(released - noises - total).max(axis=1) for world, total in worlds.items()}
    found = {world: np.flatnonzero(distance < 1e-2).tolist() for world, distance in left.items()}
    if noise == "seeded":
        assert found == {"as it is": [seed], "one user less": []}
        assert result.statement.verdict.value == "simulation only, noise is reproducible"
        assert "simulation only, noise is reproducible" in page
        assert "certified" not in str(result.statement)
    else:
        assert found == {"as it is": [], "one user less": []}
        assert result.statement.verdict.value == "certified"


def test_the_root_is_never_written(tmp_path, monkeypatch):
    root = np.random.default_rng(0).bytes(ROOT_BYTES)
    monkeypatch.setattr("secrets.token_bytes", lambda count: root)
    ready, out, seen = plan(("cohort.rounds", 4)), tmp_path / "run", []
    needles = (root, root.hex().encode(), *(str(word).encode() for word in np.frombuffer(root, "<u4")[:2]))

    def look(progress):
        file = out / "checkpoint.npz"
        seen.append(stat.S_IMODE(file.stat().st_mode))
        with np.load(file) as arrays:
            content = b"".join(arrays[name].tobytes() for name in arrays) + str(arrays["meta"]).encode()
        assert all(needle not in content for needle in needles)

    experiment.run(ready, out=out, checkpoint_every=1, callbacks=[AfterRound(look)])
    pages.write(out)
    assert set(seen) == {0o600}
    assert not (out / "checkpoint.npz").exists()
    for file in out.rglob("*"):
        assert all(needle not in file.read_bytes() for needle in needles), file.name


def test_train_draws_from_the_operating_system():
    settings = {"cohort.rounds": 1, "protocol.noise_multiplier": 100.0}
    one, two = (dovetail.train("digits", settings={**settings, "privacy": {}}) for _ in range(2))
    assert not np.allclose(*(result.parameters["params"] for result in (one, two)))
