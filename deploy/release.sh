#!/bin/sh
# Makes a release of the version in geomx_cli/__init__.py in dist/: wheel, source distribution, pages and notes, of the
# commit that is checked out. Usage: deploy/release.sh PYTHON, which has `build`. Publishes and tags nothing.
set -eu
python=$1
cd "$(dirname "$0")/.."
fail() { echo "error: $1" >&2; echo "  $2" >&2; exit 1; }

version=$("$python" -c 'import geomx_cli; print(geomx_cli.__version__)')
tag=v$version
[ -z "$(git status --porcelain)" ] || fail "the work tree differs from its commit" "commit or remove what git status shows"
grep -qx "version: $version" CITATION.cff || fail "CITATION.cff has another version than $version" "correct it"
grep -qF "geomx $version" docs/reference/options.md || fail "docs/reference/options.md is not of $version" "see CONTRIBUTING.md on generated pages"
notes=$(awk -v head="## [$version]" 'index($0, head) == 1 { on = 1; next } /^## / { on = 0 } on' CHANGELOG.md)
[ -n "$notes" ] || fail "CHANGELOG.md has no section ## [$version]" "rename Unreleased to: ## [$version] - $(date +%F)"
commit=$(git rev-parse HEAD)
if tagged=$(git rev-parse --quiet --verify "refs/tags/$tag^{commit}"); then
  [ "$tagged" = "$commit" ] || fail "the tag $tag is at another commit" "check it out, or raise the version"
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# From the commit, so that nothing else of this folder gets in.
git archive "$commit" | tar -x -C "$work"
rm -rf "dist/$version"
mkdir -p "dist/$version"
"$python" -m build --outdir "dist/$version" "$work" >"$work/build.log" || { cat "$work/build.log" >&2; exit 1; }
git archive --prefix="geomx-$version/" -o "dist/$version/geomx-docs-$version.tar.gz" "$commit" README.md CHANGELOG.md docs
printf '%s\n' "$notes" >"dist/$version/NOTES.md"

echo "trying the wheel in a fresh environment"
"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "dist/$version"/geomx_cli-"$version"-*.whl
shown=$(cd "$work" && "$work/venv/bin/geomx" --version)
case " $shown " in *"$version"*) ;; *) fail "geomx --version says $shown" "build again from a clean clone" ;; esac
(cd "$work" && "$work/venv/bin/python" -m geomx_cli.commands.reference) | cmp - docs/reference/options.md ||
  fail "docs/reference/options.md is not what the wheel has" "see CONTRIBUTING.md on generated pages"
(cd "$work" && "$work/venv/bin/geomx" launch --local --dry-run --network linear >/dev/null)
(cd "dist/$version" && sha256sum -- * >SHA256SUMS)
ls -1 "dist/$version"
[ -n "$tagged" ] || echo "next: git tag -s $tag -m 'geomx $version' $commit"
