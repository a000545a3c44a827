"""From matrix.yaml to published images, and back to nothing.

`matrix` expands matrix.yaml to cells, `dockerfile` renders them, `plan` says what a build would do, and
`executor` does it. `trim` removes device code that cannot run. `stores` keeps images in engines and
registries, `publish` makes a version of them public, and `retire` removes it. `reports` has the outcomes of
builds, `outdated` finds what has aged since a matrix was locked, and `proposal` makes a matrix for a fleet.
"""
