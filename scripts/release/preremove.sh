#!/bin/sh
# Before the package's files go: dpkg's argument is "remove", rpm's 0, unless another version follows.
[ -d /run/systemd/system ] || exit 0
case ${1:-} in
remove | 0) systemctl disable --now pincheck-watch.service || true ;;
esac
