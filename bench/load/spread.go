package main

import (
	"math"
	"slices"
	"sort"
	"syscall"
)

// spread is how values lie, in milliseconds.
type spread struct {
	P50  float64 `json:"p50"`
	P99  float64 `json:"p99"`
	P999 float64 `json:"p999"`
	Max  float64 `json:"max"`
}

// spreadOf sorts values in place.
func spreadOf(values []float64) spread {
	if len(values) == 0 {
		return spread{}
	}
	slices.Sort(values)
	at := func(q float64) float64 {
		rank := int(math.Ceil(q*float64(len(values)))) - 1
		return math.Round(values[max(rank, 0)]*1000) / 1000
	}
	return spread{at(0.5), at(0.99), at(0.999), at(1)}
}

// bounds of the buckets of a histogram, in milliseconds; what is above the last one counts there.
var bounds = []float64{
	0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 1.5, 2, 3, 4, 5, 7.5, 10, 15, 20, 30, 50, 75, 100, 200, 500, 1000, 2000, 5000,
}

// histogramOf counts values by bucket: pairs of its upper bound and how many lie in it.
func histogramOf(values []float64) [][2]float64 {
	counted := make([][2]float64, len(bounds))
	for at, bound := range bounds {
		counted[at][0] = bound
	}
	for _, value := range values {
		counted[min(sort.SearchFloat64s(bounds, value), len(bounds)-1)][1]++
	}
	return counted
}

// cpuSeconds is what this program took so far, user and system.
func cpuSeconds() float64 {
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		return 0
	}
	return float64(used.Utime.Nano()+used.Stime.Nano()) / 1e9
}
