package capture_test

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"io"
	"io/fs"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/capture"
	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/internal/hosttest"
)

const planted = "S3CR3T"

// leaks are texts with a secret, in the forms that secrets have on hosts.
var leaks = []string{
	"https://tok:S3CR3T@host/x", "https://S3CR3T@host", "https://a:p/S3CR3T@b@host/x", "s3://S3CR3T:S3CR3T@bucket",
	"https://bucket/x?X-Amz-Signature=S3CR3T", "https://host/x#S3CR3T", "HTTPS://tok:S3CR3T@host",
	"alice:S3CR3T@nas:/export", "S3CR3T@nas:/export", "S3CR3T@[2001:db8::9]:/x",
	"vers=3.0,username=S3CR3T,password=S3CR3T,domain=S3CR3T", "pass=S3CR3T", "credentials=/root/S3CR3T",
	"python serve.py --token S3CR3T --port 80", "--password=S3CR3T", `--api-key "S3CR3T x"`, "--hf-token=S3CR3T",
	"AWS_SECRET_ACCESS_KEY=S3CR3T", "HF_TOKEN=S3CR3T", "DB_PASSWORD: S3CR3T", "Authorization: Bearer S3CR3T99",
	`{"token": "S3CR3T"}`, "hf_S3CR3TS3CR3TS3CR3T", "ghp_S3CR3TS3CR3TS3CR3T", "eyJhbGciOiJI.S3CR3TS3CR3T.xyz",
}

// unpackedText is all that is in an archive.
func unpackedText(t *testing.T, a *capture.Archive) string {
	t.Helper()
	z, err := gzip.NewReader(bytes.NewReader(write(t, a)))
	require.NoError(t, err)
	text, err := io.ReadAll(z)
	require.NoError(t, err)
	return string(text)
}

// No form of a secret is in an archive, whatever file, variable or fact had it.
func TestArchivesHaveNoSecrets(t *testing.T) {
	t.Parallel()
	hosts, err := filepath.Glob("../../../../testdata/hosts/healthy-*.txtar")
	require.NoError(t, err)
	require.NotEmpty(t, hosts)
	fsys, err := hosttest.Load(hosts[0])
	require.NoError(t, err)
	rec := hostinfo.Record(fsys)
	hostinfo.Read(rec, nil)
	for _, leak := range hosttest.Sample(leaks) {
		a := &capture.Archive{Host: fstest.MapFS{}}
		for name, file := range rec.Host() { // each file that is read
			file := *file
			if file.Mode&(fs.ModeSymlink|fs.ModeDevice) == 0 {
				file.Data = append(bytes.Clone(file.Data), "\n"+leak+"\nName:\t"+leak+"\n"...)
			}
			a.Host[name] = &file
		}
		if !strings.Contains(leak, "/") { // of which no name is
			a.Host["proc/named/"+leak] = &fstest.MapFile{Mode: 0o444}
		}
		a.Host["proc/link"] = &fstest.MapFile{Mode: fs.ModeSymlink | 0o777, Data: []byte(leak)}
		for name := range hostinfo.Read(rec, []string{"CUDA_VISIBLE_DEVICES=x", "LD_LIBRARY_PATH=x", "CUDA_HOME=x", "container=x"}).Env {
			a.Environ = append(a.Environ, name+"="+leak)
		}
		facts := &doctor.Facts{}
		require.Greater(t, plant(reflect.ValueOf(facts).Elem(), leak, 0), 100, "fields")
		facts.Host = nil
		text, err := json.Marshal(facts)
		require.NoError(t, err)
		a.Facts = text
		require.Contains(t, unpackedText(t, a), planted)
		for what, a := range map[string]*capture.Archive{"with names": a.WithoutSecrets(), "without": a.WithoutSecrets().WithoutNames(capture.Names{})} {
			all := unpackedText(t, a)
			if i := strings.Index(all, planted); i >= 0 {
				assert.Fail(t, what, "%q: %q", leak, all[max(0, i-60):min(len(all), i+40)])
			}
		}
	}
}

// plant sets all strings of a value that JSON has, makes what is absent, and returns how many they were.
func plant(v reflect.Value, text string, depth int) (n int) {
	if depth > 16 {
		return 0
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(text)
		return 1
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		return plant(v.Elem(), text, depth+1)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		return plant(v.Index(0), text, depth+1)
	case reflect.Map:
		value, key := reflect.New(v.Type().Elem()).Elem(), reflect.New(v.Type().Key()).Elem()
		n = plant(value, text, depth+1) + plant(key, text, depth+1)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, value)
		return n
	case reflect.Struct:
		for i := range v.NumField() {
			if f := v.Type().Field(i); f.IsExported() && f.Tag.Get("json") != "-" {
				n += plant(v.Field(i), text, depth+1)
			}
		}
	}
	return n
}

// Sources of mounts lose who mounted them, and options what only their file system knows.
func TestMountsHaveNoCredentials(t *testing.T) {
	t.Parallel()
	const before = `31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate
40 23 0:50 / /a rw - fuse.sshfs alice:p@ss@nas:/export rw,user_id=0,group_id=0
41 23 0:51 / /b rw - fuse.rclone https://tok:S3CR3T@host/x rw,vendor_key=x/y
42 23 0:52 / /c rw - cifs //filer/share rw,vers=3.1.1,username=alice,password=p,domain=CORP,uid=0
43 23 0:53 / /d rw - ceph mon1:6789:/ rw,name=admin,secret=AQ==,acl
44 23 0:54 / /e rw - overlay overlay rw,lowerdir=/x/a:/x/b,upperdir=/u,workdir=/w
45 23 0:55 / /f rw - tmpfs  rw,size=65536k
`
	a := (&capture.Archive{Host: fstest.MapFS{"proc/self/mountinfo": {Data: []byte(before)}}}).WithoutSecrets()
	assert.Equal(t, `31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate
40 23 0:50 / /a rw - fuse.sshfs secret-1@nas:/export rw,user_id=0,group_id=0
41 23 0:51 / /b rw - fuse.rclone https://secret-2@host/x rw,vendor_key=secret-3
42 23 0:52 / /c rw - cifs //filer/share rw,vers=3.1.1,username=secret-4,password=secret-5,domain=secret-6,uid=0
43 23 0:53 / /d rw - ceph mon1:6789:/ rw,name=secret-7,secret=secret-8,acl
44 23 0:54 / /e rw - overlay overlay rw,lowerdir=/x/a:/x/b,upperdir=/u,workdir=/w
45 23 0:55 / /f rw - tmpfs  rw,size=65536k
`, string(a.Host["proc/self/mountinfo"].Data))
}

// What is no secret stays, so that the checks see what the host shows.
func TestWhatIsNoSecretStays(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		"0::/user.slice/user-1000.slice/user@1000.service/app.slice\n", "12:devices:/system.slice/slurmstepd@job.scope\n",
		"NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  (root@builder)\n", "Token Ring\n", "nvidia 1000 0 - Live 0x0\n",
		"PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:64,pinned_max_cached_size_mb:64", "/nix/store/x-gcc@12.1.0/lib",
		"model name\t: Intel(R) Xeon(R) CPU @ 2.00GHz\n", "https://docs.example.org/x/y", "iommu=pt intel_iommu=on", "MemTotal: 12 kB\n",
	} {
		a := (&capture.Archive{Host: fstest.MapFS{"x": {Data: []byte(text)}}}).WithoutSecrets()
		assert.Equal(t, text, string(a.Host["x"].Data))
	}
}

// strings counts the texts that a type can have, each list and map with one entry. It fails for kinds that plant
// does not reach.
func stringsOf(t *testing.T, typ reflect.Type, at string) (n int) {
	t.Helper()
	switch typ.Kind() {
	case reflect.String:
		return 1
	case reflect.Pointer, reflect.Slice:
		return stringsOf(t, typ.Elem(), at+"[]")
	case reflect.Map:
		return stringsOf(t, typ.Key(), at+".key") + stringsOf(t, typ.Elem(), at+".value")
	case reflect.Struct:
		for i := range typ.NumField() {
			if f := typ.Field(i); f.IsExported() && f.Tag.Get("json") != "-" {
				n += stringsOf(t, f.Type, at+"."+f.Name)
			}
		}
		return n
	case reflect.Bool, reflect.Int, reflect.Int64, reflect.Uint64, reflect.Uint8, reflect.Float64:
		return 0
	}
	assert.Fail(t, "a kind that no secret is planted in", "%s: %s", at, typ)
	return 0
}

// The texts of facts are all of kinds in which secrets were planted above, however deep.
func TestSecretsWerePlantedInAllFields(t *testing.T) {
	t.Parallel()
	f := &doctor.Facts{}
	want := stringsOf(t, reflect.TypeFor[doctor.Facts](), "facts")
	assert.Equal(t, want, plant(reflect.ValueOf(f).Elem(), planted, 0))
	f.Host = nil // its files are planted in
	text, err := json.Marshal(f)
	require.NoError(t, err)
	assert.Equal(t, want-stringsOf(t, reflect.TypeFor[hostinfo.Host](), "host"), strings.Count(string(text), planted), "all are in JSON, under names of their own")
}
