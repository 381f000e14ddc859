"""What a config key means, from the command line: whoever has a wheel has no folder of documents."""

import pytest

from dovetail.experiment import keys
from dovetail.experiment.config import Config


def test_every_key_has_a_meaning_a_type_and_itself_as_a_name():
    found = list(keys.sections())
    assert {section.name for section in found} == {"", *Config.__struct_fields__} - {
        "seed",
        "noise",
        "diagnostics",
    }
    for section in found:
        for key in section.keys:
            assert key.meaning and keys.type_in_words(key.type), (section.title, key.name)
            name = f"{section.protocol or section.name}.{key.name}" if section.name else key.name
            assert any(key in one.keys for one in keys.explain(name)), name


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("cohort.rounds", "[cohort] rounds: int\n  Number of rounds.\n"),
        ("rounds", "[cohort] rounds: int\n  Number of rounds.\n"),
        ("delta", "[privacy] delta: float (default 0.00001)\n"),
        ("task.name", "[task] name: str (required)\n"),
        ("seed", "seed: int (default 0)\n"),
        ("cohort", "min_size: int\n  Minimum number of users per round"),
        ("secagg", "aggregators: int (default 2)\n"),
        ("clip_norm", "  of central_sub, local_sub\n"),
        ("protocol", "one of apes, binary_sum"),
    ],
)
def test_help_says_what_a_key_means(command, key, said):
    status, out, err = command("help", key)
    assert status == 0, err
    assert said in out


def test_help_lists_all_keys(command):
    _, out, _ = command("help")
    assert "[privacy]: eps, delta, neighbors, unit, stop, ceiling\n" in out
    assert "[protocol] name = 'fedavg': no keys of its own\n" in out


@pytest.mark.parametrize(
    ("key", "near"),
    [("cohort.sise", "cohort.size"), ("clpi_norm", "clip_norm"), ("cohrt", "cohort"), ("dp_fll", "dp_fl")],
)
def test_an_unknown_key_is_refused_with_the_nearest(command, key, near):
    status, out, err = command("help", key)
    assert (status, out) == (2, "")
    assert err == f"dovetail: unknown config key {key!r}: did you mean {near!r}?\n"
