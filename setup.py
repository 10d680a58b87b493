from setuptools import find_packages, setup

# Templates lie beside the package in a checkout, and inside it once installed.
setup(
    packages=[*find_packages(include=["geomx_cli*"]), "geomx_cli.templates"],
    package_dir={"geomx_cli.templates": "templates"},
)
