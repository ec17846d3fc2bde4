"""Versions on the Hub: data sets, feature stores and drafters, each with a card, a tag and its checks.

    push: check what is here -> repository of the same kind and schema -> upload -> compare -> tag
    pull: commit that the tag names -> download -> check -> folder

`dataset`, `features` and `drafter` have a `push_...` and a `pull_...` function each; `after_run` pushes at the end of
a launched stage. Nothing is imported here: pulling a data set needs no torch.
"""
