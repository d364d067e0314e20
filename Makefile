# Everything goes through scripts/check.sh, so that one step by hand is the same step as in CI.
.PHONY: check test race lint cross arm64 libcudart gpu fmt golden clean

# What CI runs.
check:
	scripts/check.sh

# CGO_ENABLED=0, shuffled.
test:
	scripts/check.sh test

# With the race detector and checkptr; needs a C compiler.
race:
	scripts/check.sh race

lint:
	scripts/check.sh format tidy lint

# Builds and vets for every target.
cross:
	scripts/check.sh vet

# The tests of code that depends on the processor, as arm64 programs under qemu-user.
arm64:
	scripts/check.sh arm64

# The tests with NVIDIA's own runtime libraries, without a GPU.
libcudart:
	scripts/check.sh libcudart

# The bundle for a GPU host: .build/gpu/bundle.tar.xz. scripts/gpu-test.sh HOST does all in one.
gpu:
	scripts/gpu-test.sh build

fmt:
	gofmt -w .
	go mod tidy

# Rewrites the golden files; read the diff before you commit it. It runs only the packages whose tests
# have the flag -update.
golden:
	go test $$(grep -rl --include='*_test.go' 'flag.Bool("update"' . | xargs -r dirname | sort -u) -update

# The fetched libraries in .libcudart stay.
clean:
	rm -rf .build
