#!/bin/sh
# Programs that the tests run beside Python: an SSH server, namespaces, packet filters, a browser. Installs what is missing.
set -eu
PATH=$PATH:/usr/sbin:/sbin
missing=""
command -v sshd >/dev/null && command -v ssh-keygen >/dev/null && command -v ssh-agent >/dev/null ||
  missing="$missing openssh-server openssh-client"
command -v ip >/dev/null || missing="$missing iproute2"
command -v nft >/dev/null || missing="$missing nftables"
command -v chromium >/dev/null || missing="$missing chromium"
[ -z "$missing" ] && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "the tests need these packages, please install them:$missing" >&2
  exit 1
fi
# Debian starts a server that it installs; the tests start their own.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod 755 "$policy"
  trap 'rm -f "$policy"' EXIT
fi
apt-get update -qq
# shellcheck disable=SC2086 # several words
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
