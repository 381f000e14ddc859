"""Pages: the statement in words that are right, nothing that runs or loads, every number from the files beside it."""

import copy
import dataclasses
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import jsonschema
import pytest
import report_samples as samples
from tiny import TASK

from dovetail import experiment, pages
from dovetail.audit import curves
from dovetail.experiment import config
from dovetail.experiment.folder import BANNER
from dovetail.pages import review, words
from dovetail.pages.words import at_least, at_most, number
from dovetail.statements import Bound, Neighbors, Scope, Statement, Theorem, Trust, Unit, Verdict, no_guarantee

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "privacy.schema.json").read_text())
VOID = {"meta", "br", "input", "path", "line", "polyline", "polygon", "rect"}
RUN = {
    "task": {"name": "tiny"},
    "protocol": {"name": "dp_fl", "clip_norm": 1.0},
    "cohort": {"kind": "everyone", "rounds": 3},
    "privacy": {"eps": 3.0, "delta": 1e-5},
}
NO_TARGET = ("privacy", {"delta": 1e-5})
SEEDED = ("noise", "seeded")
CASES = {
    "dp_fl": (),
    "ss_topk": (("protocol", {"name": "ss_topk", "clip_value": 0.3, "k": 3, "eps_local": 0.5}), NO_TARGET, SEEDED),
    "apes": (
        ("protocol", {"name": "apes", "clip_value": 0.3, "budgets": [0.5, 2.0]}),
        NO_TARGET,
        SEEDED,
        ("task", {"name": "tiny", "partition": "iid", "users": 40}),
    ),
    "fedavg": (("protocol", {"name": "fedavg"}), NO_TARGET),
    "digits": (),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of tiny trainings, with their plans, made when they are asked for."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("runs") / name
            if name == "digits":
                plan = experiment.prepare(config.read("digits", [("cohort.rounds", 2)]))
            else:
                plan = experiment.prepare(config.parse(RUN, CASES[name]), task=TASK)
            experiment.run(plan, out=folder)
            pages.write(folder)
            made[name] = (folder, plan)
        return made[name]

    return get


class Reader(HTMLParser):
    """The text of a page; refuses unbalanced tags, and whatever runs or loads something."""

    def __init__(self, page):
        super().__init__()
        self.open, self.texts, self.links = [], [], []
        self.feed(page)
        assert self.open == []
        self.text = re.sub(r"\s+", " ", " ".join(self.texts))

    def handle_starttag(self, tag, attributes):
        assert tag not in ("script", "img", "iframe", "link", "object", "embed", "form", "base")
        for name, value in attributes:
            assert not name.startswith("on"), f"{name} runs something"
            assert name not in ("src", "srcset", "style")
            if name == "href":
                self.links.append(value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append(data)
        elif self.open:
            assert "@import" not in data
            assert "url(" not in data


def read(path):
    return Reader(path.read_text())


# a run


@pytest.mark.parametrize("name", CASES)
def test_privacy_json_is_as_its_schema_says(runs, name):
    validator = jsonschema.Draft202012Validator(SCHEMA)
    validator.check_schema(SCHEMA)
    validator.validate(json.loads((runs(name)[0] / "privacy.json").read_text()))


@pytest.mark.parametrize(
    "broken",
    [
        lambda data: data.pop("certified"),
        lambda data: data["certified"].pop("neighbors"),
        lambda data: data["certified"].update(eps=None),
        lambda data: data["certified"].update(unbounded=True),
        lambda data: data["certified"].update(verdict="probably"),
        lambda data: data["certified"]["premises"][0].update(delta=2.0),
        lambda data: data["units"].pop("subject"),
        lambda data: data["certified"].update(note="x"),
        lambda data: data["certified"]["theorem"].update(where=""),
        lambda data: data["origin"].update(setting="somewhere"),
        lambda data: data["origin"]["data"].update(sha256="0" * 64),
    ],
)
def test_a_broken_privacy_json_is_refused(runs, broken):
    data = json.loads((runs("dp_fl")[0] / "privacy.json").read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(data)
    broken(data)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate(data)


@pytest.mark.parametrize("name", CASES)
def test_a_report_says_everything_and_loads_nothing(runs, name):
    folder, _ = runs(name)
    page = read(folder / "report.html")
    summary = json.loads((folder / "privacy.json").read_text())
    statement = Statement.from_json(summary["certified"])
    for text in (
        *words.statement_in_sentences(statement),
        *words.meaning_of_numbers(statement),
        *statement.assumptions,
    ):
        assert text in page.text
    for other in ("claimed", "local", "shuffler"):
        if summary[other] is not None:
            assert re.sub(r"\s+", " ", summary[other]["theorem"]["where"]) in page.text
    assert f"{summary['accuracy']:.2%}" in page.text
    assert "What is not covered" in page.text
    assert "dovetail run --audit" in page.text
    assert BANNER not in page.text
    assert "@misc{" in page.text or "@inproceedings{" in page.text
    assert all(link.startswith(("https://", "#")) for link in page.links)
    opening = "This was a simulation" if summary["noise"] == "seeded" else "This training protects"
    assert page.text.index("No guarantee" if statement.is_unbounded else opening) < 400


@pytest.mark.parametrize("name", ["dp_fl", "ss_topk", "apes"])
def test_a_report_says_what_ran_on_what(runs, name):
    folder, _ = runs(name)
    page = read(folder / "report.html").text
    origin = json.loads((folder / "privacy.json").read_text())["origin"]
    for text in (
        "one machine held the data of all users",
        f"Users {origin['users']}",
        f"Records {origin['records']}",
        "one user, including all of that user's data",
        "is replaced by any other; the number of users stays" if name != "dp_fl" else "Neighbours",
        "times smaller than 1/n",
        {"dp_fl": "noise multiplier", "ss_topk": "eps_local 0.5", "apes": "local budgets of users from 0.5 to 2"}[name],
        origin["library"]["version"],
        origin["library"]["code"],
        origin["data"]["hmac_sha256"],
        origin["data"]["key_file"],
    ):
        assert text in page


def test_a_run_of_an_older_version_says_what_is_not_known(runs, tmp_path):
    folder, _ = runs("dp_fl")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    data = json.loads((folder / "privacy.json").read_text())
    del data["origin"]
    (tmp_path / "privacy.json").write_text(json.dumps(data))
    page = read(pages.write(tmp_path)).text
    assert "Not recorded by the version of Dovetail that ran it." in page
    assert "no fingerprint: not recorded" in page


def test_labels_that_are_numbers_have_a_score_and_no_accuracy(runs, tmp_path):
    folder, _ = runs("dp_fl")
    (tmp_path / "config.toml").write_bytes((folder / "config.toml").read_bytes())
    lines = [json.dumps({"round": index, "accuracy": None, "metrics": {"loss": 2.0}, "eps": 1.0}) for index in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    data = json.loads((folder / "privacy.json").read_text())
    scores = {"accuracy": None, "metrics": {"r2": 0.51}, "baseline": {"rule": "mean baseline", "r2": 0.0}}
    (tmp_path / "privacy.json").write_text(json.dumps({**data, **scores}))
    page = read(pages.write(tmp_path)).text
    assert "test R2 0.51 mean baseline 0" in page
    assert "test accuracy" not in page


@pytest.mark.parametrize(
    ("delta", "population", "words"),
    [
        (0.0, 100, "no exceptions"),
        (1e-6, None, "cannot be compared"),
        (1e-2, 100, "not below 1/n: publishing the data of one of them, chosen at random, would satisfy it"),
        (5e-3, 100, "2 times smaller than 1/n, which is little"),
        (1e-5, 1000, "where 1/n is 0.001 for n = 1,000 users: 100 times smaller than 1/n"),
    ],
)
def test_delta_is_compared_with_the_number_of_users(delta, population, words):
    scope = dataclasses.replace(SCOPE, population=population)
    assert words in review.delta_in_words(stated(delta=delta, scope=scope))


def test_the_order_is_the_reviewers(runs):
    page = read(runs("apes")[0] / "report.html").text
    parts = (
        "This was a simulation with noise from a known seed",
        "What eps means",
        "test accuracy",
        "What ran, on what",
        "Declared public",
        "Who is protected",
        "Who sees what",
        "Mechanism",
        "The proof",
        "Assumptions",
        "What tuning cost",
        "Data collection",
        "What is not covered",
        "Accuracy and budget",
        "Eps per user",
        "What the shuffler learns",
        "Audit",
        "Sign-off",
        "Config",
        "References",
    )
    places = [page.index(part) for part in parts]
    assert places == sorted(places)


def test_nothing_is_promised_where_nothing_is(runs):
    page = read(runs("fedavg")[0] / "report.html").text
    assert "No guarantee" in page
    assert "Reason: no noise is added" in page
    assert "What eps means" not in page


def test_the_budget_curve_ends_at_what_was_spent_and_shows_the_target(runs):
    folder, _ = runs("dp_fl")
    page = (folder / "report.html").read_text()
    assert "budget: eps 3" in page
    assert "spent: 4 values from 0 to 3" in page, "from round 0 on"
    assert "budget: eps" not in (runs("apes")[0] / "report.html").read_text()


def test_an_audit_is_written_beside_the_run_and_changes_nothing_else(runs):
    folder, plan = runs("ss_topk")
    before = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "report.html"}
    curves.write_audit(plan, folder)
    after = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "report.html"}
    found = json.loads(after.pop("audit.json"))
    assert after == before
    assert 0 < found["eps_lower"] <= found["certified"]["eps"]
    assert found["certified"]["eps"] < json.loads(before["privacy.json"])["certified"]["eps"], "one round of three"
    page = read(pages.write(folder)).text
    assert f"eps is at least {at_least(found['eps_lower'])}" in page
    assert "The attack finds no more than the statement allows." in page
    assert "In plain words: the best attack that we ran can tell with" in page
    assert "dovetail run --audit" not in page
    (folder / "audit.json").write_text(json.dumps({**found, "consistent": False}))
    assert "the proof or the code is wrong" in read(pages.write(folder)).text
    (folder / "audit.json").write_text(json.dumps({"reason": "no attack is known"}))
    assert "Not audited: no attack is known." in read(pages.write(folder)).text
    (folder / "audit.json").unlink()
    pages.write(folder)


def test_text_from_files_is_text(runs, tmp_path):
    folder, _ = runs("dp_fl")
    data = json.loads((folder / "privacy.json").read_text())
    evil = copy.deepcopy(data)
    evil["certified"].update(adversary=samples.EVIL, span=samples.EVIL, assumptions=[samples.EVIL])
    evil["certified"]["proof"]["theorems"][0].update(where=samples.EVIL, key=samples.EVIL)
    evil["protocol"]["name"] = samples.EVIL
    evil["origin"]["declared"]["name"] = samples.EVIL
    for name in ("metrics.jsonl",):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    config = (folder / "config.toml").read_text()
    assert 'name = "tiny"' in config
    named = config.replace('name = "tiny"', f"name = '{samples.EVIL}'")
    (tmp_path / "config.toml").write_text(named + "# </pre>" + samples.EVIL)
    (tmp_path / "privacy.json").write_text(json.dumps(evil))
    (tmp_path / "audit.json").write_text(json.dumps({"reason": samples.EVIL}))
    columns = [{"name": samples.EVIL, "bounds": None, "categories": [samples.EVIL]}]
    recipe = json.loads((folder / "recipe.json").read_text())
    (tmp_path / "recipe.json").write_text(json.dumps({**recipe, "columns": columns}))
    page = read(pages.write(tmp_path)).text
    for text in (
        "training run on {}",
        "Column {}",
        "1 values: {}",
        "Not audited: {}.",
        "against the {};",
        "by {}",
        "protocol {}",
        "name = '{}'",
    ):
        assert text.format(samples.EVIL) in page


# words

SCOPE = Scope(trust=Trust.SHUFFLE, adversary="analyzer", neighbors=Neighbors.REPLACE_ONE, unit=Unit.USER)
BY = Theorem(key="BW18.thm8", where="Balle, Wang (ICML 2018), Thm. 8")


def stated(eps=1.0, delta=1e-6, scope=SCOPE, **more):
    return scope.state(Bound(eps=eps, delta=delta, proof=BY.proof), Verdict.CERTIFIED, span="60 rounds", **more)


def test_the_statement_in_words():
    scope = dataclasses.replace(SCOPE, assumptions=("a", "b"))
    assert words.statement_in_sentences(stated(scope=scope)) == [
        "This training protects one user, including all of that user's data.",
        "If that user's data is replaced by any other, what the analyzer sees over 60 rounds changes little: "
        "it is differentially private with eps = 1 and delta = 1e-6.",
        "Shufflers are trusted as the assumptions state: only so many may collude with the analyzer.",
        "Proof: Balle, Wang (ICML 2018), Thm. 8. It holds under the 2 assumptions below.",
    ]


@pytest.mark.parametrize("unit", Unit)
@pytest.mark.parametrize("neighbors", Neighbors)
@pytest.mark.parametrize("trust", Trust)
def test_every_scope_has_words_of_its_own(unit, neighbors, trust):
    scope = Scope(trust=trust, adversary="somebody", neighbors=neighbors, unit=unit)
    mine = " ".join(words.statement_in_sentences(stated(scope=scope)))
    for other in (
        *(dataclasses.replace(scope, unit=one) for one in Unit if one is not unit),
        *(dataclasses.replace(scope, neighbors=one) for one in Neighbors if one is not neighbors),
        *(dataclasses.replace(scope, trust=one) for one in Trust if one is not trust),
        dataclasses.replace(scope, adversary="another"),
    ):
        assert " ".join(words.statement_in_sentences(stated(scope=other))) != mine


def test_personal_budgets_are_said():
    assert "Each of the 3 users has an eps of its own, from 0.5 to 1;" in " ".join(
        words.statement_in_sentences(stated(per_user=(0.5, 0.7, 1.0)))
    )


def test_the_power_of_a_test_is_that_of_randomized_response():
    """Randomized response meets the bound: rejecting on the rarer answer is the best test there is."""
    for eps in (0.1, 1.0, 3.0):
        lie = 1 / (1 + math.exp(eps))
        assert words.largest_power(stated(eps, 0.0), false_alarms=lie) == pytest.approx(1 - lie)
    assert words.largest_power(stated(0.0, 0.0), false_alarms=0.01) == pytest.approx(0.01)
    assert words.largest_power(stated(800.0, 0.0)) == 1.0
    assert "x" not in words.meaning_of_numbers(no_guarantee(SCOPE, reason="x"))
    assert words.meaning_of_numbers(stated(800.0))[1].count("e^eps = more than 1e304") == 1
    assert words.meaning_of_numbers(stated(2.0))[1].count("e^eps = 7.39;") == 1, "7.3891 rounded up"
    assert words.meaning_of_numbers(stated(2.0, 0.0))[1].endswith("at most e^eps = 7.39, without exception.")


def test_bounds_are_rounded_outward():
    assert at_most(1.00001) == "1.001"
    assert at_most(1.0) == "1"
    assert at_most(1e-5) == "1e-5"
    assert at_most(1.0000000001e-5) == "1.001e-5"
    assert at_least(0.99999) == "0.9999"
    assert [number(value) for value in (None, 0, 12345.6, 0.00012, 1234567.0)] == [
        "-",
        "0",
        "12,350",
        "1.2e-4",
        "1.235e6",
    ]


def test_what_is_not_covered_depends_on_the_statement():
    local = dataclasses.replace(SCOPE, trust=Trust.LOCAL)
    tuned = dataclasses.replace(SCOPE, assumptions=("hyper-parameters were chosen without the private data",))
    others = {"item": stated(), "user": stated(), "subject": no_guarantee(SCOPE, reason="subjects are unknown")}

    def said(statement, **more):
        known = {"local": no_guarantee(local, reason="all is seen"), "shuffler": None, "diagnostics": False, **more}
        return " ".join(words.not_covered(statement, others, **known))

    assert "then no guarantee remains (all is seen)" in said(stated())
    assert "then only the local guarantee of (8, 1e-6)-DP remains" in said(stated(), local=stated(8.0))
    assert "One subject instead of one user: subjects are unknown." in said(stated())
    assert "One item" not in said(stated()), "what is promised to an item stands in the table of units"
    assert "diagnostics" not in said(stated())
    assert "diagnostics" in said(stated(), diagnostics=True)
    assert "looking at the private data" in said(stated(scope=tuned))
    assert "looking at the private data" not in said(stated())
    assert "The curator itself" in said(stated(scope=dataclasses.replace(SCOPE, trust=Trust.CURATOR)))
    assert "took part" in said(stated())
    assert "took part" not in said(stated(scope=dataclasses.replace(SCOPE, neighbors=Neighbors.ADD_REMOVE)))
    assert "it knows who takes part" in said(stated(), shuffler=stated(0.0, 0.0))


# comparisons and papers


def test_a_comparison_ranks_by_accuracy_and_says_what_is_equal(tmp_path):
    page = read(pages.write_comparison_page(samples.comparison(tmp_path)))
    places = [
        page.text.index(f" {name} ", page.text.index("Ranking")) for name in ("dp_fl", "split_and_mix", "ss_topk")
    ]
    assert places == sorted(places)
    assert "calibrated to eps at most 1 at delta 5e-6 for replacing one user" in page.text
    assert "two shufflers that do not collude" in page.text
    assert "21 MB" in page.text
    assert f"nothing is certified {samples.EVIL}" in page.text
    assert page.text.count("Accuracy against upload") == 2, "as a title and for those who hear it"


def test_a_comparison_of_nothing_says_so(tmp_path):
    data = json.loads((samples.comparison(tmp_path) / "comparison.json").read_text())
    (tmp_path / "comparison.json").write_text(json.dumps({**data, "rows": [], "figures": []}))
    assert "No protocol has been compared." in read(pages.write_comparison_page(tmp_path)).text


def test_a_paper_shows_verdicts_and_what_was_not_run(tmp_path):
    page = read(pages.write_paper_page(samples.paper(tmp_path)))
    for text in (
        "claimed (recomputed)",
        "holds",
        "unproven",
        "refuted",
        "eps ≥ 0.837",
        "not run here: needs an accelerator",
        "Show all 20 rows",
        "needs binary reports",
        "@inproceedings{FLAME",
        f"SS-Topk {samples.EVIL}",
        f"Another one {samples.EVIL}.",
    ):
        assert text in page.text
    assert page.text.count("claims that are refuted 6") == 1
    assert page.links == [], "there is no index yet"


def test_a_paper_that_is_not_finished_says_so(tmp_path):
    folder = samples.paper(tmp_path)
    data = json.loads((folder / "headline.json").read_text())
    (folder / "headline.json").write_text(json.dumps({**data, "finished": False}))
    assert "Not finished" in read(pages.write_paper_page(folder)).text


def test_a_paper_that_was_stopped_has_no_page(tmp_path):
    samples.index(tmp_path)
    (tmp_path / "apes" / "paper.json").write_text("{}")
    assert read(pages.write_index_page(tmp_path)).links == ["flame/report.html"]
    with pytest.raises(ValueError, match="holds no reproduced paper"):
        pages.write_paper_page(tmp_path / "apes")


def test_the_index_links_to_every_paper_that_is_there(tmp_path):
    page = read(pages.write_index_page(samples.index(tmp_path)))
    assert page.links == ["flame/report.html", "apes/report.html"]
    assert "best accuracy, ours: 86.7%" in page.text
    assert read(pages.write_paper_page(tmp_path / "flame")).links == ["../index.html"]
