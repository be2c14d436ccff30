"""python -m harness.deploy HOST: this source tree, built, checked and measured on another machine.

`values` types what comes from people; `source` lists what is sent; `plan` builds every argv; `remote` is the
one script that runs on the other side; `transport` runs ssh and rsync; `session` deploys to one host;
`records` writes reports. docs/deploy.md is the runbook.
"""
