"""The files of the tables, parsed back, and the command that writes them."""

import csv
import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from reproduction.cells import read_cells
from reproduction.config import Config
from reproduction.errors import UserError
from reproduction.plan import cell_config
from reproduction.reporting.page import as_page, write_tables
from reproduction.reporting.render import as_csv, as_json, as_latex, as_markdown
from scripts import report
from tests.reproduction.tables import COUNTS, Configs, shortened, tables_of, write_run

HTM, GRADIENT = "table1/cifar100_htm", "table3/gradient"
HOSTILE = '<script>alert(1)</script> a|b & 100% $x_1^2~ {y} \\input "q" [z] # *i* `c`'


@pytest.fixture
def outputs(tmp_path: Path, configs: Configs) -> Path:
    """Two seeds of HTM, a failed run with a hostile error, a hostile folder."""
    folder = tmp_path / "outputs"
    folder.mkdir()
    for seed in (0, 1):
        write_run(folder, configs[HTM], seed, name=f"htm & {seed}", hardware=HOSTILE)
    write_run(folder, configs[GRADIENT], 5, name="<i>'\"?#", status="failed", error=HOSTILE)
    (folder / "<b>foreign").mkdir()
    return folder


class Tags(HTMLParser):
    """Collects tags with attributes and text, and checks that what opens is closed."""

    VOID = ("meta",)

    def __init__(self, page: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_json_and_csv_hold_the_same_numbers(outputs: Path, configs: Configs):
    for table in tables_of(outputs, configs)[0].values():
        content = json.loads(as_json(table))
        rows = list(csv.DictReader(io.StringIO(as_csv(table))))
        assert content["scale"] == "full" and content["warning"] is None
        assert len(rows) == len(content["records"]) == len(table.records)
        for row, entry in zip(rows, content["records"], strict=True):
            assert list(row) == list(entry)
            for key, value in entry.items():
                text = ";".join(map(str, value)) if isinstance(value, list) else str(value)
                assert row[key] == ("" if value is None else text), key


def test_json_holds_unrounded_results(outputs: Path, configs: Configs):
    records = json.loads(as_json(tables_of(outputs, configs)[0][4]))["records"]
    (full,) = [entry for entry in records if entry["experiment"] == "table4/full"]
    assert (full["n"], full["seeds"], full["runs"]) == (2, [0, 1], ["htm & 0", "htm & 1"])
    assert full["top1_last_mean"] == 80.5 and full["top1_best_mean"] == 81.0
    assert full["top1_last_std"] == pytest.approx(0.5**0.5)
    assert full["top1_last_minus_paper"] == pytest.approx(80.5 - 83.56)
    assert full["top1_best_minus_paper"] == pytest.approx(81.0 - 83.56)
    assert full["git_revisions"] == ["ab" * 20] and full["seconds_mean"] == 7200


def test_latex_is_a_booktabs_table_of_equal_rows(outputs: Path, configs: Configs):
    for table in tables_of(outputs, configs)[0].values():
        text = as_latex(table)
        (layout,) = re.findall(r"\\begin\{tabular\}\{([lr]+)\}", text)
        rows = [line for line in text.splitlines() if line.endswith(r" \\")]
        widths = {len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows if "multicolumn" not in row}
        assert widths == {len(layout)}
        assert all(f"\\{rule}rule" in text for rule in ("top", "mid", "bottom"))
        bare = re.sub(r"\\.", "", text)
        assert bare.count("{") == bare.count("}")


def test_latex_escapes_what_tex_would_read(outputs: Path, configs: Configs):
    text = as_latex(tables_of(outputs, configs)[0][3])
    (note,) = [line for line in text.splitlines() if line.startswith("Not counted")]
    assert r"a\textbar{}b \& 100\% \$x\_1\textasciicircum{}2\textasciitilde{} \{y\}" in note
    assert r"\textbackslash{}input" in note and r"\#" in note and "<" not in note
    assert r"80.50 $\pm$ 0.71" in text and r"$-$3.06" in text


def test_markdown_rows_are_of_equal_width_and_escaped(outputs: Path, configs: Configs):
    for number, table in tables_of(outputs, configs)[0].items():
        text = as_markdown(table)
        rows = [line for line in text.splitlines() if line.startswith("|")]
        assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {len(table.columns) + 1}
        assert "<script>" not in text
        assert (r"&lt;script&gt;alert(1)&lt;/script&gt; a\|b &amp; 100%" in text) == (number != 2)


def test_every_file_of_a_small_scale_warns(outputs: Path, configs: Configs):
    short = shortened(configs)
    write_run(outputs, short[HTM], name="short")
    tables, collection = tables_of(outputs, short, "smoke")
    for table in tables.values():
        for render in (as_markdown, as_latex):
            text = render(table)
            assert "at smoke scale" in text and "WARNING. SMOKE SCALE" in text.replace("*", "")
        assert "SMOKE SCALE" in json.loads(as_json(table))["warning"]
        for row in csv.DictReader(io.StringIO(as_csv(table))):
            assert row["scale"] == "smoke" and "SMOKE SCALE" in row["warning"]
    page = as_page(list(tables.values()), collection)
    assert page.count("WARNING. SMOKE SCALE") == 1 + len(tables)  # at the top and at each table
    full, collection = tables_of(outputs, configs)
    assert "WARNING" not in as_page(list(full.values()), collection)


def test_the_page_holds_everything_and_loads_nothing(outputs: Path, configs: Configs):
    tables, collection = tables_of(outputs, configs)
    page = as_page(list(tables.values()), collection)
    tags = Tags(page)
    for table in tables.values():
        assert ("section", {"id": f"table{table.number}"}) in tags.found
        assert table.title in tags.text
    for cell in read_cells():
        assert cell.row in tags.text
    names = {tag for tag, _ in tags.found}
    assert not names & {"script", "link", "img", "iframe", "object", "i", "b"}
    assert not re.search(r"https?:|url\(|@import|//[a-z]", page)
    assert "prefers-color-scheme: dark" in page and "width=device-width" in page
    wrapped = [attributes for tag, attributes in tags.found if attributes.get("class") == "scroll"]
    assert len(wrapped) == sum(tag == "table" for tag, _ in tags.found) == 7
    assert not any(key.startswith(("on", "src")) for _, found in tags.found for key in found)


def test_the_page_shows_hostile_text_as_text(outputs: Path, configs: Configs):
    tables, collection = tables_of(outputs, configs)
    tags = Tags(as_page(list(tables.values()), collection))
    assert HOSTILE in tags.text and "<b>foreign" in tags.text and "<i>'\"?#" in tags.text
    links = [found["href"] for tag, found in tags.found if tag == "a"]
    assert "../htm%20%26%200/" in links and "../%3Ci%3E%27%22%3F%23/" in links
    anchors = {f"#{found['id']}" for _, found in tags.found if "id" in found}
    assert {link for link in links if link and link.startswith("#")} == anchors


def test_links_of_the_page_lead_to_files(outputs: Path, configs: Configs):
    tables, collection = tables_of(outputs, configs)
    files = write_tables(outputs, list(tables.values()), collection)
    page = (outputs / "report" / "index.html").read_text()
    links = {found["href"] for tag, found in Tags(page).found if tag == "a"}
    names = {file.name for file in files}
    assert len(names) == 21 and all(file.is_file() for file in files)
    assert names - {"index.html"} == {x for x in links if x and x[0] not in "#."}
    again, collection = tables_of(outputs, configs)
    assert "report" not in {entry.folder for entry in collection.unused}
    assert as_page(list(again.values()), collection) == page


def test_a_run_named_report_is_not_written_into(outputs: Path, configs: Configs):
    write_run(outputs, configs[HTM], 7, name="report")
    tables, collection = tables_of(outputs, configs)
    assert "report" in [run.folder for run in collection.runs()]
    with pytest.raises(UserError, match="is the folder of a run"):
        write_tables(outputs, list(tables.values()), collection)
    assert not (outputs / "report" / "index.html").exists()


def test_the_command_writes_what_it_prints(outputs, configs, monkeypatch, capsys):
    monkeypatch.setattr(report, "resolved", lambda *args: configs)
    monkeypatch.setattr(report, "count", lambda papers: COUNTS)
    argv = ["report.py", "--outputs", str(outputs), "--tables", "4", "2", "4"]
    monkeypatch.setattr(sys, "argv", argv)
    report.main()
    printed = capsys.readouterr().out.splitlines()
    assert sorted(Path(line).name for line in printed) == sorted(
        ["index.html", *(f"table{n}.{x}" for n in (2, 4) for x in ("csv", "json", "md", "tex"))]
    )
    assert {str(path) for path in (outputs / "report").iterdir()} == set(printed)


@pytest.mark.parametrize(
    "args",
    [["--tables", "6"], ["--scale", "huge"], ["--outputs", "nowhere"], ["--devices", "x"], ["odd"]],
)
def test_bad_arguments_end_in_one_line(args, configs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "resolved", lambda *args: configs)
    monkeypatch.setattr(sys, "argv", ["report.py", *args])
    with pytest.raises(SystemExit) as end:
        report.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and args[-1] in line
    assert list(tmp_path.iterdir()) == []


def test_configurations_are_the_experiments_own_but_for_what_is_asked():
    cells = [cell for cell in read_cells() if cell.experiment == "table2/imagenet1k_htm"]

    def config(*args: str) -> Config:
        (found,) = report.resolved(cells, report.build_parser().parse_args(args)).values()
        return found

    own = config()
    other = config("--dataset", "imagenet1k", "--data", "/elsewhere", "--devices", "4")
    assert (own.dataset.root, own.devices) == ("data/imagenet", 1)
    assert (other.dataset.root, other.devices) == ("/elsewhere", 4)
    assert own.recipe == other.recipe
    assert config("--scale", "short").recipe.epochs == own.recipe.epochs / 10


def test_a_smoke_report_reads_smoke_runs_and_stays_beside_them(tmp_path, monkeypatch, capsys):
    smoke = cell_config(read_cells()[1], "smoke", outputs=str(tmp_path))
    (tmp_path / "smoke").mkdir()
    write_run(tmp_path / "smoke", smoke, 0)
    monkeypatch.setattr(report, "count", lambda papers: COUNTS)
    monkeypatch.setattr(
        sys, "argv", ["report.py", "--scale", "smoke", "--tables", "1", "--outputs", str(tmp_path)]
    )
    report.main()
    assert {Path(line).parent for line in capsys.readouterr().out.splitlines()} == {
        tmp_path / "smoke" / "report"
    }
    text = (tmp_path / "smoke" / "report" / "table1.md").read_text()
    assert "SMOKE SCALE" in text and "1 finished" in text


def test_the_tables_need_no_torch():
    code = (
        "import sys, reproduction.reporting.page; "
        "print({'torch', 'timm', 'hydra', 'matplotlib'} & set(sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "set()"
