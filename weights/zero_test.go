package weights_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/weights"
)

// Zero values, nil, typed nil, and values out of range make errors, and no panics.
func TestZeroNilAndOutOfRangeAreErrors(t *testing.T) {
	t.Parallel()
	var (
		noFile      *weights.File
		noModel     *weights.Model
		noTensor    *weights.Tensor
		noPlan      *weights.Plan
		noLoaded    *weights.Loaded
		noCtx       context.Context
		ctx         = t.Context()
		withoutFile = &weights.Tensor{Name: "without file", DType: weights.U8, Shape: []int{4}, Size: 4}
	)
	f := mustParse(t, makeSafetensors(t, nil, u8("a", 4), u8("b", 4)), "f")
	a, _ := f.Tensor("a")
	_, rt := testgpu.Sim(t, cudasim.Config{})
	memory := memoryOf(t, rt.Devices()[0], 100)
	on := map[int]weights.Memory{0: memory}
	path := filepath.Join(t.TempDir(), "m.safetensors")
	require.NoError(t, os.WriteFile(path, makeSafetensors(t, nil, u8("a", 4)), 0o600))
	good, err := weights.NewPlan(f.Tensors(), nil, weights.PlanOptions{Align: 1})
	require.NoError(t, err)
	// changed is the plan with another device.
	changed := func(change func(*weights.Plan)) func() error {
		p := &weights.Plan{Devices: slices.Clone(good.Devices)}
		p.Devices[0].Tensors = slices.Clone(p.Devices[0].Tensors)
		change(p)
		return func() error { return p.Load(ctx, on, weights.LoadOptions{}) }
	}
	place := func(p weights.Placement) func() error {
		return func() error { return weights.Place(ctx, []weights.Placement{p}, weights.LoadOptions{}) }
	}
	share := func(s weights.Share) func() error {
		return func() error { _, err := weights.PlanShares([]weights.Share{s}, weights.PlanOptions{}); return err }
	}
	rows := func(t *weights.Tensor, from, to int) func() error {
		return func() error { _, err := t.Rows(from, to); return err }
	}
	parse := func(r io.ReaderAt) func() error {
		return func() error { _, err := weights.Parse(r, 100, "x"); return err }
	}
	open := func(f func(string) (io.Closer, error), path string) func() error {
		return func() error { _, err := f(path); return err }
	}
	openFile := func(path string) (io.Closer, error) { return weights.OpenFile(path) }
	openModel := func(path string) (io.Closer, error) { return weights.OpenModel(path) }
	for name, tt := range map[string]struct {
		call func() error
		says string
	}{
		"OpenFile of nothing":      {open(openFile, ""), "no such file"},
		"OpenFile of a zero byte":  {open(openFile, "\x00"), "invalid argument"},
		"OpenModel of nothing":     {open(openModel, ""), "no such file"},
		"OpenModel of a zero byte": {open(openModel, "\x00"), "invalid argument"},
		"Parse of nil":             {parse(nil), "nil reader"},
		"Parse of a nil *os.File":  {parse((*os.File)(nil)), "invalid argument"},
		"Parse of a nil bytes":     {parse((*bytes.Reader)(nil)), "panic: "},
		"Parse of a nil strings":   {parse((*strings.Reader)(nil)), "panic: "},
		"Parse of a nil section":   {parse((*io.SectionReader)(nil)), "panic: "},
		"Parse of a zero section":  {parse(&io.SectionReader{}), "EOF"},
		"Parse of a nil func":      {parse(readerAt(nil)), "panic: "},
		"Parse of a negative size": {func() error { _, err := weights.Parse(strings.NewReader("x"), -1, ""); return err }, "negative size -1"},
		"File.Close of nil":        {noFile.Close, "nil file"},
		"Model.Close of nil":       {noModel.Close, "nil model"},
		"NewModel of nil":          {func() error { _, err := weights.NewModel(nil); return err }, "nil file"},
		"NewModel of a nil *File":  {func() error { _, err := weights.NewModel(f, noFile); return err }, "nil file"},
		"Rows of nil":              {rows(noTensor, 0, 0), "nil tensor"},
		"Rows of a zero Tensor":    {rows(&weights.Tensor{}, 0, 0), "dimension 0 of 0"},
		"Rows of no type":          {rows(&weights.Tensor{Shape: []int{1}}, 0, 1), `the type "" is not known`},
		"Rows of another type":     {rows(&weights.Tensor{DType: "F33", Shape: []int{1, 2}}, 0, 1), `the type "F33" is not known`},
		"Rows of a negative shape": {rows(&weights.Tensor{DType: weights.U8, Shape: []int{2, -3}}, 0, 1), "negative dimension"},
		"Rows of a large shape":    {rows(&weights.Tensor{DType: weights.U8, Shape: []int{maxInt, maxInt, 2}}, 0, 1), "more than"},
		"Rows that are too many":   {rows(&weights.Tensor{DType: weights.U8, Shape: []int{maxInt, 2}}, maxInt-1, maxInt), "more than"},
		"Rows before the first":    {rows(a, -1, 0), "-1 to 0 of dimension 0"},
		"Rows behind the last":     {rows(a, maxInt, maxInt), "of dimension 0, which is 4"},
		"NewPlan of nil":           {func() error { _, err := weights.NewPlan(nil, nil, weights.PlanOptions{}); return err }, "the sequence is nil"},
		"NewPlan of a nil tensor": {func() error {
			_, err := weights.NewPlan(slices.Values([]*weights.Tensor{nil}), nil, weights.PlanOptions{})
			return err
		}, "nil tensor"},
		"NewPlan of a tensor without a file": {func() error {
			_, err := weights.NewPlan(slices.Values([]*weights.Tensor{withoutFile, withoutFile}), nil, weights.PlanOptions{})
			return err
		}, "not from a File's"},
		"NewPlan with no alignment": {func() error { _, err := weights.NewPlan(f.Tensors(), nil, weights.PlanOptions{Align: -1}); return err }, "PlanOptions.Align"},
		"PlanShares of zero":        {share(weights.Share{}), "nil tensor"},
		"PlanShares of nil":         {share(weights.Share{Part: noTensor.Whole()}), "nil tensor"},
		"PlanShares of a zero file": {share(weights.Share{Part: weights.Part{Tensor: &weights.Tensor{File: &weights.File{}}}}), "not from a File's"},
		"PlanShares of device -1":   {share(weights.Share{Part: a.Whole(), Device: -1}), "device -1"},
		"PlanShares beyond":         {share(weights.Share{Part: weights.Part{Tensor: a, From: maxInt, Size: maxInt}}), "it has 4"},
		"Load of nil":               {func() error { return noPlan.Load(ctx, on, weights.LoadOptions{}) }, "nil plan"},
		"Load without a context":    {func() error { return good.Load(noCtx, on, weights.LoadOptions{}) }, "the context is nil"},
		"Load of zero with no ctx":  {func() error { return new(weights.Plan).Load(noCtx, nil, weights.LoadOptions{}) }, "the context is nil"},
		"Load without memory":       {func() error { return good.Load(ctx, nil, weights.LoadOptions{}) }, "no memory for device 0"},
		"Load to zero memory":       {func() error { return good.Load(ctx, map[int]weights.Memory{0: {}}, weights.LoadOptions{}) }, "nil device"},
		"Load to a zero device": {func() error {
			return good.Load(ctx, map[int]weights.Memory{0: {Device: &cudart.Device{}, Ptr: 1, Bytes: maxInt}}, weights.LoadOptions{})
		}, "of no cudart.Runtime"},
		"Load before the memory":          {changed(func(p *weights.Plan) { p.Devices[0].Tensors[0].Offset = -1 }), "at -1 of device 0"},
		"Load behind the memory":          {changed(func(p *weights.Plan) { p.Devices[0].Tensors[0].Offset = maxInt }), "of device 0, which has 100"},
		"Load past the memory":            {changed(func(p *weights.Plan) { p.Devices[0].Tensors[0].Offset = 97 }), "memory of 3 bytes"},
		"Load of overlapping places":      {changed(func(p *weights.Plan) { p.Devices[0].Tensors[0].Offset = 2 }), "overlap on"},
		"Load of one device twice":        {changed(func(p *weights.Plan) { p.Devices = append(p.Devices, p.Devices[0]) }), "devices 0 and 0 of the plan are both"},
		"Load of a zero tensor":           {changed(func(p *weights.Plan) { p.Devices[0].Tensors[0] = weights.Placed{} }), "nil tensor"},
		"Load of a tensor without a file": {changed(func(p *weights.Plan) { p.Devices[0].Tensors[0].Tensor = withoutFile }), "not from a File's"},
		"Load of negative bytes":          {changed(func(p *weights.Plan) { p.Devices[0].Bytes = -1; p.Devices[0].Device = 7 }), "no memory for device 7"},
		"LoadNew of nil":                  {func() error { _, err := noPlan.LoadNew(ctx, rt.Devices(), weights.LoadOptions{}); return err }, "nil plan"},
		"LoadNew without a context":       {func() error { _, err := good.LoadNew(noCtx, rt.Devices(), weights.LoadOptions{}); return err }, "the context is nil"},
		"LoadNew without devices":         {func() error { _, err := good.LoadNew(ctx, nil, weights.LoadOptions{}); return err }, "device 0, of 0 devices"},
		"LoadNew onto nil":                {func() error { _, err := good.LoadNew(ctx, []*cudart.Device{nil}, weights.LoadOptions{}); return err }, "nil or zero"},
		"LoadNew onto zero":               {func() error { _, err := good.LoadNew(ctx, []*cudart.Device{{}}, weights.LoadOptions{}); return err }, "nil or zero"},
		"LoadModel of nothing":            {func() error { _, err := weights.LoadModel(ctx, rt.Devices()[0], "", weights.LoadOptions{}); return err }, "no such file"},
		"LoadModel onto nil":              {func() error { _, err := weights.LoadModel(ctx, nil, path, weights.LoadOptions{}); return err }, "nil or zero"},
		"LoadModel without ctx": {func() error {
			_, err := weights.LoadModel(noCtx, rt.Devices()[0], path, weights.LoadOptions{})
			return err
		}, "the context is nil"},
		"Loaded.Ptr of nil":                    {func() error { _, err := noLoaded.Ptr("a"); return err }, "nothing of this name"},
		"Loaded.Ptr of zero":                   {func() error { _, err := new(weights.Loaded).Ptr("a"); return err }, "nothing of this name"},
		"Loaded.Close of nil":                  {noLoaded.Close, "nil Loaded"},
		"Loaded.Close without ctx":             {func() error { return new(weights.Loaded).CloseContext(noCtx) }, "the context is nil"},
		"Placed.Ptr of zero":                   {func() error { _, err := weights.Placed{}.Ptr(); return err }, "weights: address"},
		"Place without a context":              {func() error { return weights.Place(noCtx, nil, weights.LoadOptions{}) }, "the context is nil"},
		"Place of zero":                        {place(weights.Placement{}), "nil tensor"},
		"Place of a tensor without a file":     {place(weights.Placement{Part: withoutFile.Whole(), To: memory}), "not from a File's"},
		"Place to zero memory":                 {place(weights.Placement{Part: a.Whole()}), "nil device"},
		"Place to a zero device":               {place(weights.Placement{Part: a.Whole(), To: weights.Memory{Device: new(cudart.Device), Ptr: 1, Bytes: 4}}), "of no cudart.Runtime"},
		"Place to negative memory":             {place(weights.Placement{Part: a.Whole(), To: weights.Memory{Device: memory.Device, Ptr: 1, Bytes: -4}}), "memory of -4 bytes"},
		"Place of a negative part":             {place(weights.Placement{Part: weights.Part{Tensor: a, From: 2, Size: -1}, To: memory}), "-1 bytes from byte 2"},
		"FormatError of nil":                   {func() error { return errors.New((*weights.FormatError)(nil).Error()) }, "<nil>"},
		"FormatError of zero":                  {func() error { return &weights.FormatError{} }, "weights: read"},
		"LoadError of nil":                     {func() error { return errors.New((*weights.LoadError)(nil).Error()) }, "<nil>"},
		"LoadError of zero":                    {func() error { return &weights.LoadError{} }, "weights: load: <nil>"},
		"LoadError of a tensor without a file": {func() error { return &weights.LoadError{Tensor: withoutFile, Devices: []*cudart.Device{nil}} }, `weights: load tensor "without file" of `},
	} {
		require.NotPanics(t, func() {
			err := tt.call()
			if assert.Error(t, err, name) {
				assert.Contains(t, err.Error(), tt.says, name)
			}
		}, name)
	}
	assert.NoError(t, (*weights.LoadError)(nil).Unwrap())
	assert.NoError(t, new(weights.LoadError).Unwrap())
	assert.Equal(t, weights.Part{}, noTensor.Whole())
	assert.NoError(t, new(weights.Plan).Load(ctx, nil, weights.LoadOptions{Progress: func(int, int) { t.Error("progress of nothing") }}))
	assert.NoError(t, weights.Place(ctx, nil, weights.LoadOptions{}))
	for _, d := range []weights.DType{"", "F33", "\x00"} {
		elements, bytes := d.Block()
		assert.Zero(t, elements+bytes)
	}
	for _, f := range []*weights.File{nil, {}} {
		assert.Zero(t, f.Name())
		assert.Zero(t, f.Size())
		assert.Zero(t, f.Format())
		assert.Nil(t, f.Reader())
		assert.Empty(t, slices.Collect(f.Tensors()))
		assert.Empty(t, f.MetadataKeys())
		_, ok := f.Tensor("")
		assert.False(t, ok)
		_, ok = f.Metadata("")
		assert.False(t, ok)
	}
	assert.NoError(t, new(weights.File).Close())
	for _, m := range []*weights.Model{nil, {}} {
		assert.Empty(t, m.Files())
		assert.Empty(t, slices.Collect(m.Tensors()))
		_, ok := m.Tensor("")
		assert.False(t, ok)
	}
	assert.NoError(t, new(weights.Model).Close())
	for _, l := range []*weights.Loaded{nil, {}} {
		assert.Empty(t, l.Parts(""))
		assert.Empty(t, slices.Collect(l.All()))
	}
	assert.NoError(t, new(weights.Loaded).Close())
	_, err = new(weights.Plan).LoadNew(ctx, nil, weights.LoadOptions{})
	assert.NoError(t, err)
	m, err := weights.NewModel(new(weights.File))
	require.NoError(t, err)
	assert.NoError(t, m.Close())
}
