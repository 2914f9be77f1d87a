from tests.lab.fixtures import healthy_labs, lab3, lab_factory, lab_options  # noqa: F401
