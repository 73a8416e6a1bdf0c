#!/bin/sh
# scenario/large:1 and :2 on this node's engine: 200 MB that nobody can compress, and a last layer of 2 MB that differs.
set -eu
docker image inspect scenario/large:2 >/dev/null 2>&1 && exit 0
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
head -c 100000000 /dev/urandom >"$folder/one"
head -c 100000000 /dev/urandom >"$folder/two"
tar -C "$folder" -cf - one | docker import - scenario/large:base >/dev/null
for tag in 1 2; do
    head -c 2000000 /dev/urandom >"$folder/three"
    printf 'FROM scenario/large:base\nCOPY two /two\nENV SCENARIO=%s\nCOPY three /three\nENTRYPOINT ["/one"]\n' "$tag" >"$folder/Dockerfile"
    docker build --quiet --tag "scenario/large:$tag" "$folder" >/dev/null
done
