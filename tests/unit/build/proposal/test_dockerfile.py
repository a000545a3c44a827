"""Converting Dockerfiles that were made to take long."""

import pytest

from imagematrix.build.proposal.dockerfile import convert_dockerfile

MANY = 40_000  # with work for each beginning that grows with the length of the line, this would take an hour


@pytest.mark.parametrize(
    ("line", "remarks"),
    [
        (f"ARG {'CUDAARCHS=' * MANY}$", 0),
        (f"RUN {'--mount=' * MANY}x", 0),
        (f"RUN {'-gencode ' * MANY}x", 1),
        (f"# {'-gencode ' * MANY}x", 0),
        (f"   {' ' * MANY}# {'-gencode ' * MANY}x", 0),
    ],
)
def test_work_for_a_long_line_grows_with_its_length(line, remarks):
    converted = convert_dockerfile(f"FROM x\nRUN true && \\\n{line}\n  true\n", lambda _: None)
    gencode = [remark for remark in converted.remarks if "names GPUs" in remark.message]
    assert [remark.line for remark in gencode] == [3] * remarks


def test_a_value_that_is_longer_than_any_list_stays_as_it_is():
    text = f"FROM x\nARG CUDA_VERSION=12.4\nARG CUDAARCHS={'90;' * 140}90\n"
    assert "compute" not in convert_dockerfile(text, lambda _: None).axes
