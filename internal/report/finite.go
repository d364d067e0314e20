package report

import (
	"fmt"
	"math"
	"reflect"
	"time"
)

// finite returns a copy of a result without numbers that are not finite, which JSON cannot
// hold: samples and optional numbers are left out, others are 0. An error in the copy says
// how many they were. Lists that must not be null in JSON are not nil.
func finite(r *Result) *Result {
	left := 0
	r = copyFinite(reflect.ValueOf(r), &left).Interface().(*Result)
	if left > 0 {
		r.Errors = append(r.Errors, fmt.Sprintf("%s not finite and left out", plural(left, "number was", "numbers were")))
	}
	r.Errors, r.Findings, r.Benches = list(r.Errors), list(r.Findings), list(r.Benches)
	for i := range r.Benches {
		b := &r.Benches[i]
		b.Answers, b.Notes, b.Errors = list(b.Answers), list(b.Notes), list(b.Errors)
		b.Series, b.Views = list(b.Series), list(b.Views)
		for j := range b.Series {
			if e := b.Series[j].Expected; e != nil && e.Value == 0 {
				b.Series[j].Expected = nil
			}
			b.Series[j].Samples = list(b.Series[j].Samples)
		}
		for j := range b.Views {
			b.Views[j].Lines = list(b.Views[j].Lines)
		}
	}
	return r
}

func list[T any](s []T) []T {
	if s == nil {
		return []T{}
	}
	return s
}

var timeType = reflect.TypeFor[time.Time]()

func isFinite(v float64) bool { return !math.IsNaN(v) && !math.IsInf(v, 0) }

// copyFinite copies what JSON shows of a value. Interfaces are not entered.
func copyFinite(v reflect.Value, left *int) reflect.Value {
	out := reflect.New(v.Type()).Elem()
	out.Set(v)
	switch v.Kind() {
	case reflect.Float64:
		if !isFinite(v.Float()) {
			*left++
			out.SetFloat(0)
		}
	case reflect.Pointer:
		if v.IsNil() || v.Type().Elem().Kind() == reflect.Float64 && isFinite(v.Elem().Float()) {
			break
		}
		if v.Type().Elem().Kind() == reflect.Float64 {
			*left++
			out.SetZero()
			break
		}
		out = reflect.New(v.Type().Elem())
		out.Elem().Set(copyFinite(v.Elem(), left))
	case reflect.Slice:
		if v.IsNil() {
			break
		}
		out.Set(reflect.MakeSlice(v.Type(), 0, v.Len()))
		for i := range v.Len() {
			if e := v.Index(i); e.Kind() == reflect.Float64 && !isFinite(e.Float()) {
				*left++
			} else {
				out.Set(reflect.Append(out, copyFinite(e, left)))
			}
		}
	case reflect.Struct:
		if v.Type() == timeType {
			break
		}
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				out.Field(i).Set(copyFinite(v.Field(i), left))
			}
		}
	}
	return out
}
