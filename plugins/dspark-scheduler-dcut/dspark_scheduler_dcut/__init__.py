"""A scheduler for dspark: batch-level bucketed depth pruning after D-Cut (arXiv 2607.14647), exact under rejection."""
