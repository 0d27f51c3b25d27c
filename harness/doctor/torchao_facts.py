"""A program: imports what float8 layers need and prints torchao's version. Stands alone: it runs in a process of its
own, which may end in any way."""

import json


def main() -> None:
    import torchao.float8

    print(json.dumps({"version": torchao.__version__}))


if __name__ == "__main__":
    main()
