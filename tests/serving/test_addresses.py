"""The gateway's addresses, as browsers and other clients ask for them."""

import pytest
from fastapi.testclient import TestClient

from tests.conftest import refusal
from trtllm_dflash.serving.gateway import GatewaySettings, create_app

PAGE = "https://chat.example"
#: What a browser asks before the official client posts from a page.
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


@pytest.fixture(scope="module")
def ports(tiny_engine):
    """Clients of two gateways, whose Triton is not there: of one that a page may use, and of one that none may."""
    settings = {"engine": tiny_engine, "triton_url": "127.0.0.1:1", "api_key": "sesame", "model_name": "maker/tiny"}
    apps = [create_app(GatewaySettings(**settings, **more)) for more in ({"origins": [PAGE]}, {})]
    with TestClient(apps[0]) as open_to_page, TestClient(apps[1]) as closed:
        for one in (open_to_page, closed):
            one.headers["Authorization"] = "Bearer sesame"
        yield open_to_page, closed


def test_a_page_that_is_named_may_use_the_api_and_no_other(ports):
    open_to_page, closed = ports
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/models"):
        asked = open_to_page.options(path, headers={**PREFLIGHT, "Origin": PAGE, "Authorization": ""})
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, PAGE)
        assert PREFLIGHT["Access-Control-Request-Headers"] in asked.headers["access-control-allow-headers"]
    # What it then sends needs the key all the same, and tells the page why it is refused.
    for key, status in (("", 401), ("Bearer sesame", 400)):
        sent = open_to_page.post("/v1/responses", json={}, headers={"Origin": PAGE, "Authorization": key})
        assert (sent.status_code, sent.headers["access-control-allow-origin"]) == (status, PAGE)
        assert "X-Request-Id" in sent.headers["access-control-expose-headers"]
    for client, origin in ((open_to_page, "https://other.example"), (open_to_page, "null"), (closed, PAGE)):
        asked = client.options("/v1/responses", headers={**PREFLIGHT, "Origin": origin})
        assert asked.status_code in (400, 405)
        for reply in (asked, client.get("/v1/models", headers={"Origin": origin})):
            assert "access-control-allow-origin" not in reply.headers


def test_a_page_of_the_internet_may_use_the_api_on_loopback_where_it_is_named(ports):
    """Browsers that keep pages from private networks ask in one with the rest, and take a refusal for both."""
    open_to_page, _ = ports
    asks = {**PREFLIGHT, "Access-Control-Request-Private-Network": "true"}
    for origin, status, allowed in ((PAGE, 200, "true"), ("https://other.example", 400, None)):
        asked = open_to_page.options("/v1/responses", headers={**asks, "Origin": origin})
        assert (asked.status_code, asked.headers.get("access-control-allow-private-network")) == (status, allowed)
    plain = open_to_page.options("/v1/responses", headers={**PREFLIGHT, "Origin": PAGE})
    assert "access-control-allow-private-network" not in plain.headers


def test_without_a_key_no_other_page_uses_the_api_even_under_a_name_of_its_own(tiny_engine):
    """A page may name this machine itself, and is of the server's own origin then: no browser keeps it away."""
    settings = {"engine": tiny_engine, "triton_url": "127.0.0.1:1", "origins": [PAGE]}
    evil = {"Host": "evil.example:9000", "Origin": "http://evil.example:9000"}
    with TestClient(create_app(GatewaySettings(**settings))) as client:
        for path in ("/v1/chat/completions", "/v1/responses", "/tokenize"):
            reply = client.post(path, json={}, headers=evil)
            assert (reply.status_code, reply.json()["error"]["code"]) == (403, "origin_not_allowed")
            assert "--openai-origin http://evil.example:9000" in reply.json()["error"]["message"]
        of_a_file = client.get("/v1/models", headers={"Origin": "null"})
        assert of_a_file.status_code == 403
        assert "--openai-origin null" not in of_a_file.json()["error"]["message"]  # which `serve` does not take
        for headers in ({}, {"Origin": PAGE}, {"Host": "evil.example"}):  # clients that are no browsers say no origin
            assert client.get("/v1/models", headers=headers).status_code == 200
        assert client.get("/health", headers=evil).status_code == 503  # Triton's away
    with TestClient(create_app(GatewaySettings(**settings, api_key="sesame"))) as client:
        # With the key a page has been let in, by a proxy on its own address, say.
        evil["Authorization"] = "Bearer sesame"
        assert client.get("/v1/models", headers=evil).status_code == 200


def test_models_are_found_however_a_client_writes_their_address(ports):
    _, client = ports
    assert client.get("/v1/models/").json() == client.get("/v1/models").json()
    for path in ("maker/tiny", "maker%2Ftiny"):
        assert client.get(f"/v1/models/{path}").json()["id"] == "maker/tiny"
    assert client.get("/v1/models/tiny").status_code == 404
    for path in ("/v1/models", "/v1/models/", "/v1/models/maker/tiny", "/version"):
        head, whole = client.head(path), client.get(path)
        assert (head.status_code, head.headers["content-length"]) == (200, whole.headers["content-length"])
    assert (client.head("/health").status_code, client.head("/v1/responses").status_code) == (503, 405)


def test_an_origin_is_one_page_s():
    serve = ("serve", "--engine", "nowhere", "--openai-origin")
    for wrong in ("*", "chat.example", "https://chat.example/", "https://*.example", "null"):
        assert refusal(*serve, wrong, "--openai-port", 0).startswith(f"error: --openai-origin {wrong}: give SCHEME://")
    assert "no OpenAI API without --openai-port" in refusal(*serve, PAGE)
