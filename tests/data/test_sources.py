import csv
import json
import tracemalloc
import weakref

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.data import sources
from gapless.data.sources import open_rows

ROWS = [{"prompt": f"q{index} \n\"x\", 'y' é{{[", "completion": "a\r\nb" * index} for index in range(7)]


def write(path, text):
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def write_rows(path, rows):
    if path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1, ensure_ascii=False))
    elif path.suffix == ".jsonl":
        path.write_text("\n\n".join(json.dumps(row) for row in rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["prompt", "completion"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=3)
    return path


def read_all(path):
    rows = open_rows(path)
    return [rows[index] for index in range(len(rows))]


@pytest.mark.parametrize("ending", ["json", "jsonl", "csv", "parquet"])
def test_rows_come_back(tmp_path, ending):
    rows = open_rows(write_rows(tmp_path / f"rows.{ending}", ROWS))
    assert len(rows) == len(ROWS)
    # Out of order: row groups and blocks are left and entered again.
    for index in (6, 0, 3, 5, 1, 2, 4):
        assert dict(rows[index]) == ROWS[index]
    assert rows.identity() == open_rows(tmp_path / f"rows.{ending}").identity()


def test_a_block_of_parquet_is_smaller_than_a_row_group(tmp_path):
    rows = [{"text": str(index)} for index in range(1000)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=700)
    assert read_all(tmp_path / "a.parquet") == rows


def test_a_row_group_that_was_read_is_not_kept(tmp_path, monkeypatch):
    """A token store keeps its rows for the whole run, to name their places."""
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [str(i) for i in range(3000)]}), path)
    read, tables = pyarrow.parquet.ParquetFile.read_row_group, []

    def noted(*args):
        table = read(*args)
        tables.append(weakref.ref(table))
        return table

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "read_row_group", noted)
    rows = open_rows(path)
    rows[0]
    assert tables[0]() is not None
    assert [rows[index]["text"] for index in (2999, 0, 2999)] == ["2999", "0", "2999"]
    assert [table() for table in tables] == [None, None]


def test_damaged_parquet_pages(tmp_path):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [str(i) for i in range(3000)]})
    pyarrow.parquet.write_table(table, path, row_group_size=1000, use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[len(data) // 2 - 500 : len(data) // 2 + 500] = b"\xff" * 1000
    path.write_bytes(data)
    assert open_rows(path)[0] == {"text": "0"}
    with pytest.raises(ValueError, match=r"a\.parquet: rows 1000 to 1999 are damaged: ") as caught:
        open_rows(path)[1500]
    assert "\n" not in str(caught.value)


strings = st.text(st.sampled_from('a"\\[]{},:\n é'), max_size=6)
values = (
    st.none() | st.integers() | strings | st.lists(strings, max_size=3) | st.dictionaries(strings, strings, max_size=2)
)


@given(
    rows=st.lists(st.dictionaries(strings, values, max_size=3), min_size=1, max_size=4),
    indent=st.sampled_from([None, 2]),
    ascii=st.booleans(),
)
def test_any_json_array_is_cut_into_its_elements(tmp_path_factory, rows, indent, ascii):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(rows, indent=indent, ensure_ascii=ascii), encoding="utf-8")
    assert read_all(path) == rows


@given(st.lists(st.lists(st.text(st.sampled_from('a,"\n\r é')), min_size=2, max_size=2), min_size=1, max_size=5))
def test_any_csv_comes_back(tmp_path_factory, fields):
    path = tmp_path_factory.getbasetemp() / "any.csv"
    with path.open("w", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([["x", "y"], *fields])
    assert [list(row.values()) for row in read_all(path)] == fields


def test_text_lines(tmp_path):
    rows = open_rows(write(tmp_path / "a.txt", "one\r\n\n   \ntwo é\nthree"))
    assert [rows[index]["text"] for index in range(len(rows))] == ["one", "two é", "three"]
    assert [rows.where(index) for index in range(len(rows))] == ["a.txt:1", "a.txt:4", "a.txt:5"]


def test_byte_order_mark_and_json_lines_under_the_name_json(tmp_path):
    for name in ("a.json", "a.jsonl"):
        rows = open_rows(write(tmp_path / name, b'\xef\xbb\xbf{"text": "x"}\n{"text": "y"}\n'))
        assert [rows[0], rows[1]] == [{"text": "x"}, {"text": "y"}]
    assert open_rows(write(tmp_path / "b.csv", b"\xef\xbb\xbftext\nx\n"))[0] == {"text": "x"}
    assert open_rows(write(tmp_path / "b.json", b'\xef\xbb\xbf[{"text": "x"}]'))[0] == {"text": "x"}


def test_several_files_and_memory(tmp_path):
    first = write_rows(tmp_path / "a.jsonl", ROWS[:3])
    second = write_rows(tmp_path / "b.parquet", ROWS[3:])
    rows = open_rows([first, second])
    assert [rows[index] for index in range(7)] == ROWS
    assert (rows.where(1), rows.where(3)) == ("a.jsonl:3", "b.parquet:row 0")
    with pytest.raises(IndexError):
        rows[7]

    class Dataset:
        def __len__(self):
            return 7

        def __getitem__(self, index):
            return ROWS[index]

    taken = open_rows(Dataset())
    assert [taken[index] for index in range(7)] == ROWS
    assert taken.where(4) == "row 4"
    assert taken.identity() == open_rows(ROWS).identity() != open_rows(ROWS[::-1]).identity()


def test_long_csv_fields(tmp_path):
    path = write(tmp_path / "a.csv", "text\n" + "x" * 300_000 + "\n")
    assert len(open_rows(path)[0]["text"]) == 300_000


def test_a_large_file_is_not_read_into_memory(tmp_path):
    line = json.dumps({"text": "x" * 1000}) + "\n"
    path = write(tmp_path / "a.jsonl", line * 20_000)
    array = write(tmp_path / "a.json", "[" + ",".join([line] * 20_000) + "]")
    tracemalloc.start()
    for file in (path, array):
        rows = open_rows(file)
        assert len(rows) == 20_000
        assert rows.where(19_999).endswith(":20000")
        rows[19_999]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # A chunk of 16 MiB and its line ends at a time; never twenty million bytes twice.
    assert peak < 40e6


BAD = {
    "missing": (None, "a.jsonl", r"a\.jsonl does not exist"),
    "empty": ("", "a.jsonl", r"a\.jsonl is empty"),
    "blank": ("\n \n", "a.jsonl", "holds no rows"),
    "no elements": ("[]", "a.json", "holds no rows"),
    "ending": ("x", "a.xlsx", r"unknown ending; rows are read from \.jsonl"),
    "broken line": ('{"a": 1}\n\n{"a": \n', "a.jsonl", r"a\.jsonl:3: not valid JSON .*correct or remove the row"),
    "no object": ('{"a": 1}\n[1]\n', "a.jsonl", r"a\.jsonl:2: a row must be an object with named columns, not list"),
    "not utf-8": (b'{"a": "\xff"}\n', "a.jsonl", r"a\.jsonl:1: not UTF-8"),
    "header not utf-8": (b"t\xe9xt\nx\n", "a.csv", r"a\.csv:1: not UTF-8 \(.*\); convert the file"),
    "cut off": ('[{"a": 1},\n{"a": ', "a.json", r"a\.json:2: the array is not closed .*cut off"),
    "broken element": ('[{"a": 1},\n{"a" 1}]', "a.json", r"a\.json:2: not valid JSON"),
    "strings": ('[{"a": 1},\n "b"]', "a.json", "stands where a row"),
    "numbers": ('[{"a": 1}, 5, {"a": 1}]', "a.json", "'5' stands where a row"),
    "text after": ('[{"a": 1}] x', "a.json", "'x' stands where a row"),
    "no json": ("hello", "a.json", "must hold a JSON array of objects, or one object a line"),
    "fields": ("a,b\n1,2\n1,2,3\n", "a.csv", r"a\.csv:3: 3 fields where the first line names 2"),
    "quotes": ('a,b\n1,"2"x\n', "a.csv", r"a\.csv:2: not valid CSV"),
    "open quote": ('a,b\n1,"2\n', "a.csv", r"a\.csv:2: not valid CSV"),
    "twice": ("a,a\n1,2\n", "a.csv", "occurs twice"),
    "header only": ("a,b\n", "a.csv", "holds no rows"),
    "no parquet": ("PAR1", "a.parquet", "not a readable parquet file"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_files_get_one_clear_line(tmp_path, case):
    content, name, message = BAD[case]
    if content is not None:
        write(tmp_path / name, content)
    with pytest.raises(ValueError, match=message) as caught:
        read_all(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_reading_rows_does_not_count_lines(tmp_path, monkeypatch):
    # Line numbers cost a pass over the file; with one per row the time would grow with the square of its size.
    monkeypatch.setattr(sources._File, "_line", None)
    for ending in ("json", "jsonl", "csv"):
        assert read_all(write_rows(tmp_path / f"a.{ending}", ROWS)) == ROWS


def test_nothing_at_all(tmp_path):
    with pytest.raises(ValueError, match="no rows"):
        open_rows([])
    with pytest.raises(ValueError, match="is a folder"):
        open_rows(tmp_path)
    with pytest.raises(ValueError, match="row 0: a row must be an object"):
        open_rows([3])[0]
