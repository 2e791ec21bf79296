"""The OpenAPI document: it is published as it is, and the API of a real daemon conforms to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.effort import EFFORT, SEED
from support.rigs.daemon.http_api import Api

from dmq.http_api.openapi import document

ROOT = Path(__file__).resolve().parents[3]
# schemathesis takes the topic "0" of this path for a number, which would have to be refused.
_CONFIGURATION = """
[[operations]]
include-name = "PATCH /v1/topics/{topic}"
checks.negative_data_rejection.enabled = false
"""
# A daemon refuses valid requests for its state: unknown topics, a second creation, its own rules of names.
_NOT_CHECKED = "positive_data_acceptance,ensure_resource_availability,use_after_free"


def test_the_published_document_is_that_of_the_code() -> None:
    """``python -m dmq.http_api.openapi > docs/reference/http-api.json`` writes it."""
    published = json.loads((ROOT / "docs" / "reference" / "http-api.json").read_text(encoding="utf-8"))
    assert published == document()


def test_every_reference_leads_to_a_component() -> None:
    """The document is whole."""
    text = json.dumps(document())
    components = document()["components"]
    for kind in ("schemas", "responses"):
        for name in text.split(f'"#/components/{kind}/')[1:]:
            assert name.partition('"')[0] in components[kind]


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_schemathesis_finds_nothing(api: Api, tmp_path: Path) -> None:
    """Generated requests, valid and invalid, to every route: no internal error, and answers as documented."""
    (tmp_path / "schemathesis.toml").write_text(_CONFIGURATION, encoding="utf-8")
    # schemathesis waits 10 s for a document, whatever its option says; on a loaded host the process starts more slowly.
    served = tmp_path / "openapi.json"
    served.write_bytes(api.send("GET", "/v1/openapi.json").body)
    found = subprocess.run(
        [
            *(str(Path(sys.executable).parent / "schemathesis"), "run", str(served)),
            *("--url", f"http://{api.address}", "--phases", "examples,coverage,fuzzing"),
            *("--exclude-checks", _NOT_CHECKED, "--max-examples", str(5 * EFFORT), "--seed", str(SEED)),
            *("--generation-database", "none", "--no-color", "--request-timeout", "100", "--warnings", "off"),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert found.returncode == 0, found.stdout + found.stderr
