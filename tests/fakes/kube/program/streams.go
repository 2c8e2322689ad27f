// The half of a kubelet that the API server talks to: port-forward, exec and logs, by the kubelet's own library.
//
// It is told of pods by a folder: <namespace>_<name>_<uid>/ has `pid`, the host's number of the container's first
// process, `log`, what the container prints, and, once the container has ended, `exit`. Kubelet and pods: ../kubelet.py.
package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"k8s.io/cri-streaming/pkg/streaming/portforward"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	utilexec "k8s.io/utils/exec"
)

const (
	idle     = 4 * time.Hour // the kubelet's own
	creation = 30 * time.Second
	poll     = 100 * time.Millisecond
	caller   = "kube-apiserver-kubelet-client" // nobody else may ask
)

func newStreamsCommand() *cobra.Command {
	s := &streams{}
	command := &cobra.Command{Use: "streams", Args: cobra.NoArgs, RunE: func(*cobra.Command, []string) error { return s.serve() }}
	for flag, value := range map[string]*string{
		"listen": &s.listen, "pods": &s.pods, "cert": &s.cert, "key": &s.key, "client-ca": &s.clientCA,
	} {
		command.Flags().StringVar(value, flag, "", "required")
		if err := command.MarkFlagRequired(flag); err != nil {
			panic(err)
		}
	}
	return command
}

// streams serves the pods of one node.
type streams struct{ listen, pods, cert, key, clientCA string }

func (s *streams) serve() error {
	trusted, err := os.ReadFile(s.clientCA)
	if err != nil {
		return err
	}
	callers := x509.NewCertPool()
	if !callers.AppendCertsFromPEM(trusted) {
		return fmt.Errorf("%s has no certificate", s.clientCA)
	}
	routes := http.NewServeMux()
	routes.HandleFunc("/portForward/{namespace}/{pod}", s.portForward)
	routes.HandleFunc("/portForward/{namespace}/{pod}/{uid}", s.portForward)
	routes.HandleFunc("/exec/{namespace}/{pod}/{container}", s.exec)
	routes.HandleFunc("/exec/{namespace}/{pod}/{uid}/{container}", s.exec)
	routes.HandleFunc("/containerLogs/{namespace}/{pod}/{container}", s.logs)
	server := &http.Server{
		Addr: s.listen,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.TLS.PeerCertificates[0].Subject.CommonName != caller {
				http.Error(w, "only the API server may ask", http.StatusForbidden)
				return
			}
			routes.ServeHTTP(w, r)
		}),
		// HTTP/2 has no upgrade
		TLSNextProto: map[string]func(*http.Server, *tls.Conn, http.Handler){},
		TLSConfig:    &tls.Config{ClientCAs: callers, ClientAuth: tls.RequireAndVerifyClientCert},
	}
	return server.ListenAndServeTLS(s.cert, s.key)
}

// folder finds a pod's folder; of two pods with one name the one that runs counts.
func (s *streams) folder(r *http.Request) (string, error) {
	uid := r.PathValue("uid")
	if uid == "" {
		uid = "*"
	}
	found, err := filepath.Glob(filepath.Join(s.pods, r.PathValue("namespace")+"_"+r.PathValue("pod")+"_"+uid))
	if err != nil {
		return "", err
	}
	last := ""
	for _, each := range found {
		if _, err := os.Stat(filepath.Join(each, "pid")); err != nil {
			continue
		}
		last = each
		if !ended(each) {
			break
		}
	}
	if last == "" {
		return "", errors.New("pod does not exist")
	}
	return last, nil
}

func ended(folder string) bool {
	_, err := os.Stat(filepath.Join(folder, "exit"))
	return err == nil
}

// process is the container's first process. Where it has ended, it is an error.
func process(folder string) (int, error) {
	text, err := os.ReadFile(filepath.Join(folder, "pid"))
	if err != nil {
		return 0, err
	}
	if ended(folder) {
		return 0, errors.New("the container has ended")
	}
	return strconv.Atoi(strings.TrimSpace(string(text)))
}

func (s *streams) portForward(w http.ResponseWriter, r *http.Request) {
	folder, err := s.folder(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusNotFound)
		return
	}
	options, err := portforward.NewV4Options(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	portforward.ServePortForward(w, r, s, folder, "", options, idle, creation, portforward.SupportedProtocols)
}

// PortForward carries one connection to a port of the pod's loopback.
func (s *streams) PortForward(_ context.Context, folder, _ string, port int32, stream io.ReadWriteCloser) error {
	pid, err := process(folder)
	if err != nil {
		return err
	}
	there, err := dial(pid, port)
	if err != nil {
		return fmt.Errorf("failed to connect to localhost:%d inside the pod's network: %w", port, err)
	}
	defer there.Close()
	go func() {
		_, _ = io.Copy(there, stream)
		_ = there.(*net.TCPConn).CloseWrite()
	}()
	_, err = io.Copy(stream, there)
	return err
}

// dial connects to a port of the loopback that a process sees.
func dial(pid int, port int32) (connection net.Conn, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: the thread ends with this function, it is in another network
		network, failed := os.Open(fmt.Sprintf("/proc/%d/ns/net", pid))
		if failed != nil {
			err = failed
			return
		}
		defer network.Close()
		if err = unix.Setns(int(network.Fd()), unix.CLONE_NEWNET); err == nil {
			connection, err = net.DialTimeout("tcp4", fmt.Sprintf("127.0.0.1:%d", port), creation)
		}
	}()
	<-done
	return connection, err
}

func (s *streams) exec(w http.ResponseWriter, r *http.Request) {
	folder, err := s.folder(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusNotFound)
		return
	}
	options, err := remotecommand.NewOptions(r)
	if err == nil && options.TTY {
		err = errors.New("the tests' kubelet has no terminals: exec without --tty")
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	command := r.URL.Query()["command"]
	remotecommand.ServeExec(w, r, s, folder, "", r.PathValue("container"), command, options, idle, creation,
		remotecommand.SupportedStreamingProtocols)
}

// ExecInContainer runs a command as the container's first process would: its namespaces, user and environment.
func (s *streams) ExecInContainer(_ context.Context, folder, _, _ string, words []string, in io.Reader, out, errs io.WriteCloser,
	_ bool, _ <-chan remotecommand.TerminalSize, _ time.Duration) error {
	pid, err := process(folder)
	if err != nil {
		return err
	}
	environment, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		return err
	}
	user, err := owner(pid)
	if err != nil {
		return err
	}
	nsenter := []string{"--target", strconv.Itoa(pid), "--mount", "--uts", "--ipc", "--net", "--pid", "--root", "--wd"}
	command := exec.Command("nsenter", append(append(nsenter, user...), append([]string{"--"}, words...)...)...)
	for _, each := range bytes.Split(environment, []byte{0}) {
		if len(each) > 0 {
			command.Env = append(command.Env, string(each))
		}
	}
	command.Stdout, command.Stderr = out, errs
	if in != nil { // not by command.Stdin: a command that has ended would be waited for until its input ends
		given, err := command.StdinPipe()
		if err != nil {
			return err
		}
		go func() {
			defer given.Close()
			_, _ = io.Copy(given, in)
		}()
	}
	err = command.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return utilexec.CodeExitError{Err: err, Code: exit.ExitCode()}
	}
	return err
}

// owner says as whom a process runs, in nsenter's words.
func owner(pid int) ([]string, error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return nil, err
	}
	words := []string{}
	for flag, name := range map[string]string{"--setuid": "Uid:", "--setgid": "Gid:"} {
		for _, line := range strings.Split(string(status), "\n") {
			if fields := strings.Fields(line); len(fields) > 2 && fields[0] == name {
				words = append(words, flag, fields[2])
			}
		}
	}
	return words, nil
}

// logs sends what the container has printed, and with `follow` what it prints until it ends.
func (s *streams) logs(w http.ResponseWriter, r *http.Request) {
	folder, err := s.folder(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusNotFound)
		return
	}
	log, err := os.Open(filepath.Join(folder, "log"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusNotFound)
		return
	}
	defer log.Close()
	for {
		over := r.URL.Query().Get("follow") != "true" || ended(folder)
		if _, err := io.Copy(w, log); err != nil || over {
			return
		}
		if flusher, can := w.(http.Flusher); can {
			flusher.Flush()
		}
		select {
		case <-r.Context().Done():
			return
		case <-time.After(poll):
		}
	}
}
