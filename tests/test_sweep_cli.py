"""`placer sweep`: its tables, JSON, CSV and pictures."""

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from cli_cases import fail, invoke, succeed

from cost_models import Roofline
from cost_models.report import plot_sweep, sweep_report
from cost_models.report.sweep import _legend
from cost_models.sweep import AXES, PLACEMENTS, Setting, platform, sweep
from placer.errors import PlacerError

NUMBER_OR_NONE = {"type": ["number", "null"]}
SCHEMA = {
    "type": "object",
    "required": ["cost_model", "base", "axes", "grid", "placements", "platforms", "points",
                 "winners"],
    "additionalProperties": False,
    "properties": {
        "cost_model": {"const": "roofline"},
        "base": {"type": "object", "required": sorted(AXES)},
        "axes": {"type": "object", "additionalProperties": {"type": "array"}},
        "grid": {"type": "boolean"},
        "placements": {"type": "array", "items": {"enum": list(PLACEMENTS)}},
        "platforms": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "sources"],
                "properties": {"sources": {"additionalProperties": {"type": "string"}}},
            },
        },
        "points": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["platform", "placement", "varied", *AXES, "feasible", "step_time_s",
                             "samples_per_s", "waits_for", "hbm_lookup_share", "short_device",
                             "short_resource", "short_bytes", "extra_servers", "detail"],
                "additionalProperties": False,
                "properties": {
                    **{axis: {"type": "number"} for axis in AXES},
                    "platform": {"type": "string"},
                    "placement": {"enum": list(PLACEMENTS)},
                    "varied": {"type": "string"},
                    "feasible": {"type": "boolean"},
                    "step_time_s": NUMBER_OR_NONE,
                    "samples_per_s": NUMBER_OR_NONE,
                    "waits_for": {"type": ["string", "null"]},
                    "hbm_lookup_share": NUMBER_OR_NONE,
                    "short_device": {"type": ["string", "null"]},
                    "short_resource": {"enum": ["hbm", "dram", None]},
                    "short_bytes": {"type": ["integer", "null"], "exclusiveMinimum": 0},
                    "extra_servers": {"type": "integer"},
                    "detail": {"type": "string"},
                },
                "if": {"properties": {"feasible": {"const": True}}},
                "then": {"properties": {"samples_per_s": {"type": "number"}}},
                "else": {"properties": {"samples_per_s": {"type": "null"},
                                        "detail": {"minLength": 1}}},
            },
        },
        "winners": {
            "type": "array",
            "items": {"type": "object", "required": ["platform", "varied", "winner", "lead"]},
        },
    },
}  # fmt: skip
COMMAND = ("sweep", "--vary", "sparse=4,8", "--set", "rows=1000", "--set", "batch=64")


def test_json_has_its_schema_and_the_values_of_the_library() -> None:
    document = json.loads(succeed(*COMMAND, "--vary", "rows=5e8", "--format", "json").stdout)
    jsonschema.validate(document, SCHEMA)
    assert len(document["points"]) == 4 * 3 * len(PLACEMENTS)
    base = replace(Setting(), rows=1000, batch=64)
    machines = [platform(name) for name in ("big-basin", "zion", "8xh200", "16xcpu")]
    axes = {"sparse": (4.0, 8.0), "rows": (5e8,)}
    found = sweep(machines, axes, Roofline(), base=base)
    assert document == json.loads(json.dumps(sweep_report(found).to_json()))
    short = [point for point in document["points"] if point["short_bytes"]]
    assert {point["short_resource"] for point in short} == {"hbm", "dram"}


def test_a_winner_is_ahead_of_the_first_that_is_slower() -> None:
    document = json.loads(succeed(*COMMAND, "--platform", "big-basin", "--format", "json").stdout)
    for winner in document["winners"]:
        rates = {
            point["placement"]: point["samples_per_s"]
            for point in document["points"]
            if point["varied"] == winner["varied"] and not point["extra_servers"]
        }
        assert winner["winner"] == max(rates, key=lambda name: rates[name])
        slower = [one for one in rates.values() if one < rates[winner["winner"]] * (1 - 1e-9)]
        assert winner["lead"] == pytest.approx(winner["samples_per_s"] / max(slower))
        assert winner["lead"] > 1


def test_table_csv_and_picture(tmp_path: Path) -> None:
    picture = tmp_path / "sweep.png"
    table = succeed(*COMMAND, "--vary", "rows=5e8", "--plot", picture)
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert "zion: samples/s by placement" in table.stdout
    assert "16xcpu has no GPUs" in table.stdout
    assert "of HBM for rows" in table.stdout
    assert "The fastest placement of each machine" in table.stdout
    lines = succeed(*COMMAND, "--format", "csv").stdout.splitlines()
    assert lines[0].startswith("section,platform,placement,varied,dense,sparse,rows,")
    assert sum(line.startswith("points,") for line in lines) == 4 * 2 * len(PLACEMENTS)


@pytest.mark.parametrize("width", [1.5, 3.7, 9.0])
def test_no_placement_of_the_legend_lies_outside_of_the_picture(width: float) -> None:
    """A picture of one axis is narrow: all nine names in a line used to be cropped."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 3.0), layout="constrained")
    _legend(figure, dict.fromkeys(PLACEMENTS, "#123456"))
    figure.draw_without_rendering()
    [legend] = figure.legends
    assert len(legend.get_texts()) == len(PLACEMENTS)
    inside, whole = legend.get_window_extent(), figure.bbox
    assert inside.x0 >= whole.x0
    assert inside.x1 <= whole.x1
    assert inside.y0 >= whole.y0


def test_a_grid_is_not_drawn(tmp_path: Path) -> None:
    arguments = [*COMMAND, "--platform", "zion", "--grid", "--vary", "pooling=1,8"]
    message = fail(*arguments, "--plot", tmp_path / "grid.png")
    assert "one axis at a time" in message


def test_nothing_possible_is_nothing_to_draw(tmp_path: Path) -> None:
    found = sweep([platform("cpu")], {"dense": (8,)}, Roofline(), placements=["gpu"])
    with pytest.raises(PlacerError, match="nothing to draw"):
        plot_sweep(found, tmp_path / "none.png")


def test_this_machine_is_measured() -> None:
    arguments = (*COMMAND, "--platform", "auto", "--format", "json")
    for budget in ((), ("--hbm", "1MiB")):
        document = json.loads(succeed(*arguments, *budget).stdout)
        assert "measured" in document["platforms"][0]["sources"]["CPU float32"]
        rates = {p["placement"]: p["samples_per_s"] for p in document["points"]}
        assert (rates["gpu"] is None) == bool(budget)
        assert rates["cpu"] > 0
        assert rates["remote"] is None


def test_budgets_and_bad_usage() -> None:
    document = json.loads(
        succeed(*COMMAND, "--platform", "zion", "--hbm", "1KiB", "--format", "json").stdout
    )
    short = {p["placement"]: p["short_resource"] for p in document["points"]}
    assert short["gpu"] == "hbm"
    assert short["cpu"] is None
    wrong = invoke(*COMMAND, "--placements", "moon")
    assert wrong.exit_code == 2
    assert "no placement is called 'moon'" in wrong.stderr
    assert "nothing called 'x' can be varied" in fail("sweep", "--vary", "x=1")
    assert "named more than once" in fail(*COMMAND, "--platform", "zion,zion")
    assert "placer sweep --platform" in invoke("sweep", "--help").output
