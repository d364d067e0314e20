# The skipped tests in the output of `go test -v`, each once, with the reason that it gave.
/^ *--- SKIP: / {
	line = $3 (reason == "" ? "" : ": " reason)
	if (!seen[line]++) print "  " line
}
{
	reason = ""
	if (match($0, /^ +[^ ]+\.go:[0-9]+: /)) reason = substr($0, RLENGTH + 1)
}
