"""A webhook of somebody else, which gives each pod the node selector in its annotation `choose`."""

import base64
import http.server
import json
import ssl
import sys


class Chooser(http.server.BaseHTTPRequestHandler):
    """Answers AdmissionReviews."""

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["request"]
        selector = json.loads(request["object"]["metadata"]["annotations"]["choose"])
        patch = json.dumps([{"op": "add", "path": "/spec/nodeSelector", "value": selector}])
        told = {"patchType": "JSONPatch", "patch": base64.b64encode(patch.encode()).decode()}
        response = {"uid": request["uid"], "allowed": True, **told}
        review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
        body = json.dumps(review).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    _, port, certificate, key = sys.argv
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Chooser)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()
