"""A save names files of its own folder alone, with sizes and checksums that are numbers."""

import pytest

from hfsdk.core.files import FileSum, parse_files


def test_files_are_in_the_folder_of_the_save_or_of_a_role_in_it():
    found = parse_files({"actor/common.pt": [5, 7], "save.json": [3, 0], "old": 4})
    assert found == {"actor/common.pt": FileSum(5, 7), "save.json": FileSum(3, 0), "old": FileSum(4, None)}


def test_a_path_that_leads_elsewhere_is_refused():
    taken = []
    for name in ("../x", "..", "./x", "a/..", "/etc", "a/b/c", "a//b", "", "a\\b", "a\0"):
        try:
            parse_files({name: [1, 1]})
        except ValueError:
            continue
        taken.append(name)
    assert taken == []


def test_what_is_no_size_or_checksum_is_refused():
    taken = []
    for noted in (-1, "1", [1, -1], [1, 2**32], [1, 1.0], [True, 1], [1], [1, 1, 1], None):
        try:
            parse_files({"a": noted})
        except ValueError:
            continue
        taken.append(noted)
    assert taken == []
    with pytest.raises(ValueError, match="object"):
        parse_files([])
