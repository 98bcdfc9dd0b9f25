// The program in the pods of the cluster, and the tool of the scenarios.
//
//	agent compare …   in a pod: watches each resource directly and through kubefan, records both, and
//	                  serves the difference
//	agent collect …   fetches the differences of all pods until nothing is pending, and judges them
//	agent write …     changes objects at a fixed rate
//
// A lost event shows only in a comparison by one process with one clock, so each agent reads both ways.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "agent:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return errors.New("needs compare, collect or write")
	}
	switch args[0] {
	case "compare":
		return compare(ctx, args[1:])
	case "collect":
		return collect(ctx, args[1:])
	case "write":
		return write(ctx, args[1:])
	default:
		return fmt.Errorf("%q is not compare, collect or write", args[0])
	}
}
