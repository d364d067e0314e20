# The failed tests in the output of `go test -v`, each with what it printed, and what ended a process.
/^=== (RUN|PAUSE|CONT|NAME) / { test = $3; next }
/^ *--- (PASS|SKIP): / { delete said[$3]; next }
/^ *--- FAIL: / { printf "%s\n%s", $0, said[$3]; delete said[$3]; next }
/^(ok|FAIL|\?) / || /^(ok|FAIL|\?)\t/ {
	if ($1 == "FAIL") print
	split("", said)
	split("", lines)
	crashed = 0
	next
}
/^(panic|fatal error|SIG[A-Z]+): / { crashed = 1 }
crashed { if (crashed++ <= 200) print; next }
lines[test]++ < 100 { said[test] = said[test] $0 "\n" }
