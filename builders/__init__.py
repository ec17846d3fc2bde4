"""The Datasets builders. The names `datasets.load_dataset` knows them by are registered in `registry`."""
