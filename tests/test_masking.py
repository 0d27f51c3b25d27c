"""What is shown or recorded of environment variables and command lines."""

from harness.masking import masked, masked_arguments


def test_value_is_masked_by_the_name_or_where_it_logs_in() -> None:
    assert masked("HF_TOKEN", "abc") == "***"
    assert masked("PROXY", "http://me:pw@proxy:80/x") == "http://***@proxy:80/x"
    assert masked("NCCL_DEBUG", "INFO") == "INFO"


def test_command_line_is_masked() -> None:
    arguments = ["train.py", "--api-token", "abc", "--hub-key=abc", "--steps", "3", "https://me:pw@host/x"]
    assert masked_arguments(arguments) == [
        "train.py",
        "--api-token",
        "***",
        "--hub-key=***",
        "--steps",
        "3",
        "https://***@host/x",
    ]
