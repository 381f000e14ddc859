"""What a reviewer signs: who sees what, boxes with owners, what tuning cost, and the entry of a registry."""

import dataclasses
import json
import re

import pytest
import report_samples as samples
from grids import later
from tiny import TASK

from dovetail import experiment, pages
from dovetail.experiment import config
from dovetail.pages import review, words
from dovetail.protocols import PROTOCOLS
from dovetail.statements import Neighbors, Statement, Trust, Unit

PARTIES = {
    Trust.CURATOR: ["Users", "Curator", "Public"],
    Trust.LOCAL: ["Users", "Server", "Public"],
    Trust.SHUFFLE: ["Users", "Shuffler", "Analyzer", "Public"],
    Trust.SHARES: ["Users", "3 aggregators", "Analyzer", "Public"],
    Trust.NONE: ["Users", "Server", "Public"],
}
MODELS = {"dp_fl": "Curator", "ldp_fl": "Server", "privunit": "Shuffler", "secagg": "2 aggregators"}
RUN = {
    "task": {"name": "tiny"},
    "cohort": {"kind": "everyone", "rounds": 2},
    "privacy": {"eps": 3.0, "delta": 1e-5},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder for each model of trust, made when it is asked for."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("runs") / name
            changes = [("protocol", {"name": name}), ("privacy.neighbors", PROTOCOLS[name].relation.value)]
            experiment.run(
                experiment.prepare(config.parse(RUN | {"protocol": {"name": name}}, changes), task=TASK), out=folder
            )
            pages.write(folder)
            made[name] = folder
        return made[name]

    return get


def stated(**changes):
    return dataclasses.replace(samples.certified(1.0), **changes)


# who sees what


@pytest.mark.parametrize("trust", Trust)
def test_every_model_of_trust_has_its_parties(trust):
    protocol = {"name": "p", "aggregators": 3} if trust is Trust.SHARES else {"name": "p"}
    found = review.party_boxes(stated(trust=trust), protocol, local=samples.certified(8.0), shuffler=None)
    assert [party.name for party in found] == PARTIES[trust]
    for party in found:
        assert all(dataclasses.astuple(party))


def test_what_holds_against_a_party_is_its_own_statement():
    local, own = samples.certified(8.0), samples.certified(0.5)
    shuffler, analyzer = review.party_boxes(stated(), {"name": "p"}, local=local, shuffler=own)[1:3]
    assert shuffler.holds == (
        f"if it follows the protocol: {words.eps_and_delta(own)}; "
        f"if it does not, or colludes with the analyzer: {words.eps_and_delta(local)}"
    )
    assert analyzer.holds == words.eps_and_delta(stated())
    curator = review.party_boxes(stated(trust=Trust.CURATOR), {"name": "p"}, local=local, shuffler=None)[1]
    assert curator.holds == "no guarantee"


def test_raw_data_on_one_machine_are_exposed():
    assert (
        "the raw data of all users were collected on one machine" in review.exposure_in_words(stated(), "simulation")[0]
    )
    assert "stay with the users" in review.exposure_in_words(stated(), "deployment")[0]


# the checklist


@pytest.mark.parametrize(
    ("assumption", "owner"),
    [
        (
            "whoever enrols users is trusted: every round has at least 3 honest users and no fake or colluding ones",
            "enrolment operator",
        ),
        ("at least one of the 2 aggregators is honest: it does not collude", "aggregator operators"),
        ("shuffler and analyzer do not collude", "shuffler operators"),
        (
            "every share of every coordinate is permuted on its own, uniformly, with fresh randomness",
            "shuffler operators",
        ),
        ("users draw fresh, independent noise", "client vendor"),
        ("which users drop out does not depend on the data", "client vendor"),
        ("the curator clips, adds the noise and keeps the updates to itself", "curator"),
        (
            "whoever runs the simulation is trusted: all users' data and all noise are on one machine",
            "operator of the training",
        ),
        ("the run's noise key (256 bits from the operating system) stays secret", "operator of the training"),
        ("hyper-parameters were chosen without the private data", "analyst"),
        ("every user has a place in the list of budgets of its own", "enrolment operator"),
        ("users' budgets are public and do not change when a user's data is replaced", "analyst"),
    ],
)
def test_every_assumption_has_an_owner(assumption, owner):
    assert review.owner_of(assumption) == owner


@pytest.mark.parametrize(
    ("unit", "neighbors", "said"),
    [
        (
            Unit.USER,
            Neighbors.REPLACE_ONE,
            "the number of records on this page may be public: the guarantee does not hide it",
        ),
        (
            Unit.USER,
            Neighbors.ADD_REMOVE,
            "the numbers of records and users on this page may be public: the guarantee does not hide them",
        ),
        (Unit.ITEM, Neighbors.REPLACE_ONE, None),
    ],
)
def test_counts_that_the_guarantee_does_not_hide_are_declared_public(unit, neighbors, said):
    found = [item.text for item in review.checklist(stated(unit=unit, neighbors=neighbors), {"users": 3})]
    assert [text for text in found if "on this page" in text] == ([] if said is None else [said])


def test_what_tuning_cost():
    told = {
        "by": "composition",
        "score": "accuracy",
        "public": "the test records",
        "trials": [{}, {}],
        "mean_trials": None,
    }
    assert "Nothing was spent on tuning" in review.tuning_in_words(stated(), {})
    assert "by composition among 2 trials" in review.tuning_in_words(stated(), {"tuning": told})
    random = {**told, "by": "selection", "trials": None, "mean_trials": 4.0}
    assert "4 trials on average" in review.tuning_in_words(stated(), {"tuning": random})


# the page


@pytest.mark.parametrize("name", [name if i < 2 else later(name) for i, name in enumerate(MODELS)])
def test_the_page_can_be_ticked_and_signed(runs, name):
    page = (runs(name) / "report.html").read_text()
    statement = Statement.from_json(json.loads((runs(name) / "privacy.json").read_text())["certified"])
    assert page.count('type="checkbox"') >= len(statement.assumptions) + 2
    assert f"<h3>{MODELS[name]}</h3>" in page
    assert re.findall(r"<th>(Name|Role|Date|Signature)</th>", page) == ["Name", "Role", "Date", "Signature"]
    for section in ("2.2 The Privacy Parameter ε", "2.4 The Unit of Privacy", "4.2 Threat Models"):
        assert f"see SP 800-226 (draft), {section}<" in page
    assert "nobody has assessed this page" in page
    for target in re.findall(r'href="#([^"]+)"', page):
        assert f'id="{target}"' in page


def test_only_links_to_the_web_are_links(runs, tmp_path):
    folder = runs("dp_fl")
    for name in ("config.toml", "metrics.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    data = json.loads((folder / "privacy.json").read_text())
    data["certified"]["proof"]["theorems"][0]["url"] = "javascript:alert(1)"
    (tmp_path / "privacy.json").write_text(json.dumps(data))
    assert "javascript:" not in pages.write(tmp_path).read_text()


# the registry


@pytest.mark.parametrize("name", [name if i < 2 else later(name) for i, name in enumerate(MODELS)])
def test_an_entry_has_the_numbers_of_the_run_and_leaves_the_rest_to_the_owner(runs, name):
    entry, stated = pages.registry(runs(name)), json.loads((runs(name) / "privacy.json").read_text())
    certified = stated["certified"]
    assert entry["privacy_parameters"]["eps"] == certified["eps"]
    assert entry["privacy_parameters"]["delta"] == certified["delta"]
    assert entry["trust_model"]["model"] == certified["trust"]
    assert entry["neighbours"] == certified["neighbors"]
    assert entry["privacy_unit"] == "user"
    assert entry["composition"]["scope"] == certified["span"]
    assert entry["implementation"]["version"] == stated["origin"]["library"]["version"]
    assert entry["status"] == "simulation"
    assert [key for key, value in entry.items() if value is None] == entry["to_fill"]


def test_the_command_writes_page_and_entry_again(runs, tmp_path, command):
    folder = runs("dp_fl")
    page = (folder / "report.html").read_bytes()
    (folder / "report.html").unlink()
    status, out, _ = command("report", str(folder), "--registry", str(tmp_path / "entry.json"))
    assert status == 0
    assert "for you to fill in: organisation, product" in out
    assert (folder / "report.html").read_bytes() == page
    assert json.loads((tmp_path / "entry.json").read_text()) == pages.registry(folder)


def test_a_folder_without_a_run_is_refused(tmp_path, command):
    status, _, err = command("report", str(tmp_path))
    assert status == 2
    assert "is not the folder of a finished run: it has no privacy.json" in err
    assert list(tmp_path.iterdir()) == []
