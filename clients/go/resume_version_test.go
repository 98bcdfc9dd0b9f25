package kubefan

import (
	"slices"
	"testing"

	"google.golang.org/grpc/codes"
	"kubefan.dev/clients/go/internal/leaks"
	"kubefan.dev/clients/go/internal/scripted"
	api "kubefan.dev/clients/go/kubefanv1alpha1"
)

func TestAVersionIsSentBackAsItWasReceived(t *testing.T) {
	for _, row := range []struct {
		version    string
		isComplete bool
		text       string
	}{{"218", true, "218.end"}, {"218", false, "218"}, {"218.1", false, "218.1"}} {
		text := receivedVersion(row.version, row.isComplete)
		version, isComplete := sentVersion(text)
		if text != row.text || version != row.version || isComplete == nil || *isComplete != row.isComplete {
			t.Error(row, text, version, isComplete)
		}
	}
	if text := receivedVersion("", true); text != "" {
		t.Error(text)
	}
	if version, isComplete := sentVersion(""); version != "" || isComplete != nil {
		t.Error(version, isComplete)
	}
}

func TestAWatchResumesFromThePlaceThatItReceived(t *testing.T) {
	leaks.Check(t)
	broken := scripted.Refusal(codes.Unavailable, "DRAINING", "draining")
	snapshot := scripted.Snapshot(10)
	snapshot[1].VersionIsComplete = true
	server := scripted.Start(t,
		scripted.Answer{Messages: snapshot, Err: broken},
		scripted.Answer{Messages: []*api.WatchResponse{scripted.Event("A", "x", 12)}, Err: broken},
		scripted.Answer{},
	)
	watch := started(t, server, WatchOptions{})
	var versions []string
	for range 7 {
		item, err := watch.Next()
		if err != nil {
			t.Fatal(err)
		}
		versions = append(versions, item.ResumeVersion)
	}
	// Begin and end of the snapshot, a break and its end, the event, a break and its end.
	if want := []string{"", "10.end", "10.end", "10.end", "12", "12", "12"}; !slices.Equal(versions, want) {
		t.Error(versions)
	}
	requests := server.Requests()
	if requests[0].VersionIsComplete != nil {
		t.Error(requests[0])
	}
	for i, version := range []string{"10", "12"} {
		request, isComplete := requests[i+1], version == "10"
		if request.ResourceVersion != version || request.VersionIsComplete == nil || *request.VersionIsComplete != isComplete {
			t.Error(request)
		}
	}
}

func TestTheVersionOfAListIsCompleteAndIsReadWithoutItsPlace(t *testing.T) {
	leaks.Check(t)
	server := scripted.Start(t)
	answer := func(request *api.ListRequest) ([]*api.ListResponse, error) {
		if request.ResourceVersion != "4" {
			t.Error(request)
		}
		chunk := func() *api.ListResponse { return &api.ListResponse{ResourceVersion: "5", VersionIsComplete: true} }
		return []*api.ListResponse{chunk(), chunk()}, nil
	}
	server.OnList(answer, answer)
	client, err := Connect(t.Context(), server.Address, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	pods, options := Target{Resource: "pods"}, ReadOptions{ResourceVersion: "4.end"}
	list, err := client.List(t.Context(), pods, options)
	if err != nil || list.ResourceVersion != "5.end" {
		t.Fatal(list, err)
	}
	var versions []string
	err = client.ListChunks(t.Context(), pods, options, func(chunk *api.ListResponse) error {
		versions = append(versions, chunk.GetResourceVersion())
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(versions, []string{"5.end", "5.end"}) {
		t.Error(versions)
	}
}
