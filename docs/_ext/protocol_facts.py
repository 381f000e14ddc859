"""The directive `protocol-facts`: what a protocol promises and costs, computed when the site is built.

    ```{protocol-facts} privunit
    [protocol]
    name = "privunit"
    eps_local = 2.0
    ```

shows the config and, for 1000 users, d = 7850 and delta = 5e-6 (d = 1 for the sums), one round: every statement of
`dovetail.guarantee.quotes.quote`, the assumptions of the certified one, and what a client sends by `layout` and
`messages`.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from typing import Any

from dovetail.compare import packed_size, sealed_size
from dovetail.experiment.config import Config, parse
from dovetail.guarantee import quotes
from dovetail.numbers import at_most
from dovetail.protocols import PROTOCOLS, Cohort, Protocol
from dovetail.statements import NotApplicable, Statement

__all__ = ["DELTA", "USERS", "config_of", "markdown", "plan_of", "setup"]

USERS, DIM, DELTA = 1000, 7850, 5e-6
_DEFAULTS = ("clip_norm", "clip_value", "beta", "k", "budgets", "items_per_subject", "sampling_rate")
_TITLES = {
    "certified": "certified",
    "claimed": "claimed by the paper",
    "shuffler": "what the shuffler learns",
    "local": "if nobody is trusted",
}


def config_of(toml: str) -> Config:
    """The config of a page, for some task."""
    return parse({"task": {"name": "mnist"}, **tomllib.loads(toml)})


def plan_of(toml: str) -> tuple[str, quotes.Terms]:
    """The protocol of a page's config at the reference size."""
    settings = dict(config_of(toml).protocol)
    name = settings.pop("name")
    dim = PROTOCOLS[name].only_dim or DIM
    return name, quotes.Terms(num_users=USERS, dim=dim, delta=DELTA, settings=settings)


def markdown(toml: str) -> str:
    """The generated part of a page."""
    name, plan = plan_of(toml)
    quote = quotes.quote(name, plan)
    rows = [f"| {title} | {_cells(getattr(quote, field))} |" for field, title in _TITLES.items()]
    certified = quote.certified
    return "\n".join(
        [
            *_defaults(name),
            f"One round of {plan.num_users:,} users, d = {plan.dim:,}, delta = {plan.delta:g}, computed by this build:",
            "",
            "| | eps | delta | unit | adversary | verdict |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            f"Certified by: {_sentence(str(certified.proof))}",
            "",
            *[f"- if {_plain(assumption)}" for assumption in certified.assumptions],
            *_reasons(quote),
            "",
            "**What a client sends**",
            "",
            "| | |",
            "|---|---|",
            *[f"| {what} | {value} |" for what, value in _cost(name, plan)],
            "",
        ]
    )


def _defaults(name: str) -> list[str]:
    """What is set unless a config says otherwise, where it decides how far updates are clipped or what is sent."""
    fields = {field.name: field.default for field in dataclasses.fields(PROTOCOLS[name])}  # type: ignore[arg-type]
    defaults = [f"`{key} = {fields[key]!r}`".replace("'", '"') for key in _DEFAULTS if _is_set(fields.get(key))]
    return (
        [f"Unless the config says otherwise: {', '.join(defaults)}; see [defaults](index.md#defaults).", ""]
        if defaults
        else []
    )


def _is_set(default: object) -> bool:
    return default not in (None, dataclasses.MISSING, 0)


def _cells(statement: Statement | None) -> str:
    if statement is None:
        return "- | - | - | - | -"
    numbers = "no guarantee | " if statement.is_unbounded else f"{at_most(statement.eps)} | {at_most(statement.delta)}"
    whose = f"{statement.unit.value}, {statement.neighbors.value}"
    return f"{numbers} | {whose} | {_plain(statement.adversary)} | {statement.verdict.value}"


def _reasons(quote: quotes.Quote) -> list[str]:
    """Why a statement promises nothing, or what became of a claim."""
    reasons = []
    for field, title in _TITLES.items():
        statement = getattr(quote, field)
        if statement is None or field == "certified":
            continue
        if statement.is_unbounded or field == "claimed":
            reasons += ["", f"*{title[:1].upper()}{title[1:]}:* {_sentence(str(statement.proof))}"]
    return reasons


def _cost(name: str, plan: quotes.Terms) -> list[tuple[str, str]]:
    protocol, cohort = quotes.settle_protocol(name, plan)
    layout = protocol.layout(plan.dim)
    shared = _shares_in_words(protocol, cohort, plan.dim)
    facts = [("shufflers", str(layout.shufflers or "none"))]
    if layout.padding is not None:
        facts.append(("messages in every slot after padding", f"{layout.padding.pad_to:,}"))
    try:
        messages = protocol.messages(plan.dim)
    except NotApplicable as refusal:
        if shared:
            return [*facts, ("shared between aggregators", shared), ("deployed by Dovetail's parties", "yes")]
        entries = layout.reports_per_client
        facts.append(("numbers", f"at most {entries:,} (4 bytes each in float32: {_bytes(4 * entries)})"))
        facts.append(
            ("deployed by Dovetail's parties", f"no: {_plain(str(refusal).partition(', which ')[2] or refusal)}")
        )
        return facts
    count, size = messages.per_client, messages.size
    facts.append(("messages", f"{count:,} of {size} byte{'s' * (size > 1)} ({_bytes(count * size)})"))
    facts.append(("uploaded, each sealed separately and labelled with its slot", _bytes(count * sealed_size(size))))
    if shared:
        facts.append(("instead, shared between aggregators", shared))
    facts.append(("deployed by Dovetail's parties", "yes"))
    return facts


def _shares_in_words(protocol: Protocol, cohort: Cohort, dim: int) -> str | None:
    """What a client shares where aggregators take the shuffler's place; None where they cannot."""
    try:
        contribution = protocol.contribution(cohort, dim)
    except (NotApplicable, ValueError):
        return None
    size = _bytes(packed_size(contribution))
    return f"{contribution.length:,} numbers of {contribution.bits} bits ({size}), and a seed of 32 bytes"


def _bytes(count: int) -> str:
    return f"{count:,} bytes" if count < 10_000 else f"{count / 1000:,.0f} kB"


def _sentence(text: str) -> str:
    """With links to proofs that are pages of the site, and one full stop."""
    linked = re.sub(r"docs/proofs/([\w-]+)(?:\.md)?", r"[docs/proofs/\1](../proofs/\1.md)", _plain(text))
    return f"{linked.rstrip('.')}."


def _plain(text: object) -> str:
    return str(text).replace("|", "\\|").replace("*", "\\*").replace("_", "\\_").replace("<", "&lt;")


def setup(app: Any) -> dict[str, bool]:
    """For Sphinx."""
    from docutils import nodes
    from sphinx.util.docutils import SphinxDirective

    class ProtocolFacts(SphinxDirective):
        """The directive."""

        required_arguments = 1
        has_content = True

        def run(self) -> list[nodes.Node]:
            """The config, then the facts."""
            toml = "\n".join(self.content)
            if plan_of(toml)[0] != self.arguments[0]:
                raise self.error(f"the config of {self.arguments[0]!r} names another protocol: {plan_of(toml)[0]!r}")
            shown = nodes.literal_block(toml, toml, language="toml")
            return [shown, *self.parse_text_to_nodes(markdown(toml))]

    app.add_directive("protocol-facts", ProtocolFacts)
    return {"parallel_read_safe": True}
