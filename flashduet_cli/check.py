import typer

check_app = typer.Typer(no_args_is_help=True)
