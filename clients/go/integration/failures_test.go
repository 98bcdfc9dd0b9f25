package integration

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	kubefan "kubefan.dev/clients/go"
	kubefaninformers "kubefan.dev/clients/go/informers"
	"kubefan.dev/clients/go/internal/cluster"
)

func TestATokenOverTLSReadsAndAnotherUserIsForbidden(t *testing.T) {
	checkLeaks(t)
	control := cluster.Start(t)
	create(t, control.Client, 0, 2)
	fan := control.StartKubefan(t, "", "--resource", "pods", "--tls-cert-file", control.CertFile, "--tls-private-key-file", control.KeyFile)
	address := "https://" + fan.Address
	admin := connect(t, address, kubefan.Options{CAFile: control.CAFile, TokenFile: control.TokenFile})
	list, err := admin.List(t.Context(), kubefan.Target{Resource: "pods"}, kubefan.ReadOptions{})
	if err != nil || len(list.Objects) != 2 {
		t.Fatal(list, err)
	}
	one, err := admin.Get(t.Context(), kubefan.Target{Resource: "pods", Namespace: "default", Name: "pod-1"}, kubefan.ReadOptions{})
	if err != nil || one.GetObject().GetName() != "pod-1" {
		t.Fatal(one, err)
	}
	nobody := connect(t, address, kubefan.Options{CAFile: control.CAFile, Token: cluster.NobodyToken})
	source := kubefaninformers.NewListWatch(nobody, "pods", "", &corev1.Pod{})
	if _, err := source.List(metav1.ListOptions{}); !apierrors.IsForbidden(err) {
		t.Fatal(err)
	}
	if _, err := source.Watch(metav1.ListOptions{ResourceVersion: list.ResourceVersion}); !apierrors.IsForbidden(err) {
		t.Fatal(err)
	}
	if _, err := kubefan.Connect(t.Context(), address, kubefan.Options{Token: "x"}); err == nil {
		t.Fatal("the certificate is of no CA of the system")
	}
	unknown := connect(t, address, kubefan.Options{CAFile: control.CAFile, Token: "unknown"})
	if _, err := kubefaninformers.NewListWatch(unknown, "pods", "", &corev1.Pod{}).List(metav1.ListOptions{}); !apierrors.IsUnauthorized(err) {
		t.Fatal(err)
	}
}

func TestAnExpiredVersionIsExpiredForClientGoToo(t *testing.T) {
	checkLeaks(t)
	control := cluster.Start(t)
	fan := control.StartKubefan(t, "", "--resource", "pods")
	source := kubefaninformers.NewListWatch(connect(t, fan.Address, kubefan.Options{}), "pods", "", &corev1.Pod{})
	if _, err := source.Watch(metav1.ListOptions{ResourceVersion: "99999999"}); !apierrors.IsResourceExpired(err) {
		t.Fatal(err)
	}
	if _, err := source.List(metav1.ListOptions{ResourceVersion: "99999999"}); !apierrors.HasStatusCause(err, metav1.CauseTypeResourceVersionTooLarge) {
		t.Fatal(err)
	}
	if _, err := source.Watch(metav1.ListOptions{LabelSelector: "a in"}); !apierrors.IsBadRequest(err) {
		t.Fatal(err)
	}
	missing := kubefaninformers.NewListWatch(connect(t, fan.Address, kubefan.Options{}), "secrets", "", &corev1.Secret{})
	if _, err := missing.List(metav1.ListOptions{}); !apierrors.IsNotFound(err) {
		t.Fatal(err)
	}
}
