//! The proxy between a client and a sink.

use std::time::{Duration, Instant};

use harness::{
    proxy::{Mode, Proxy},
    sink::Sink,
    wait::eventually,
};

use crate::SOON;

async fn ask(proxy: &Proxy, client: &reqwest::Client) -> reqwest::Result<u16> {
    let answer = client.post(proxy.url()).timeout(Duration::from_millis(400)).body("hello").send().await?;
    Ok(answer.status().as_u16())
}

async fn pair() -> (Sink, Proxy) {
    let sink = Sink::start().await;
    let host = sink.url().trim_start_matches("http://").trim_end_matches("/hook").to_owned();
    let proxy = Proxy::start(host).await;
    (sink, proxy)
}

#[tokio::test]
async fn a_link_forwards_refuses_and_forwards_again() {
    let (sink, proxy) = pair().await;
    assert_eq!(ask(&proxy, &harness::http_client()).await.unwrap(), 200);
    proxy.set(Mode::Refuse).await;
    assert!(ask(&proxy, &harness::http_client()).await.expect_err("refused").is_connect());
    proxy.set(Mode::Forward).await;
    assert_eq!(ask(&proxy, &harness::http_client()).await.unwrap(), 200);
    assert_eq!(sink.count(), 2);
}

#[tokio::test]
async fn a_cut_ends_open_and_new_connections() {
    let (sink, proxy) = pair().await;
    sink.reply(harness::sink::Reply::Hang);
    let client = harness::http_client();
    let hanging = tokio::spawn(client.post(proxy.url()).body("hello").send());
    sink.wait_for(1, SOON).await;
    proxy.set(Mode::Cut).await;
    assert!(!hanging.await.unwrap().expect_err("cut").is_timeout());
    let error = ask(&proxy, &harness::http_client()).await.expect_err("cut at once");
    assert!(!error.is_timeout(), "{error:?}");
    assert_eq!(sink.count(), 1);
}

#[tokio::test]
async fn a_black_hole_lets_nothing_through_until_it_is_lifted() {
    let (sink, proxy) = pair().await;
    proxy.set(Mode::BlackHole).await;
    let held = tokio::spawn(harness::http_client().post(proxy.url()).body("held").send());
    assert!(ask(&proxy, &harness::http_client()).await.expect_err("silence").is_timeout());
    assert_eq!(sink.count(), 0);
    proxy.set(Mode::Forward).await;
    assert_eq!(held.await.unwrap().unwrap().status(), 200);
}

#[tokio::test]
async fn answers_can_be_lost_after_the_request_arrived() {
    let (sink, proxy) = pair().await;
    proxy.set(Mode::SwallowAnswers).await;
    assert!(ask(&proxy, &harness::http_client()).await.expect_err("no answer").is_timeout());
    assert_eq!(sink.count(), 1);
}

#[tokio::test]
async fn a_delay_delays_both_ways() {
    let (_sink, proxy) = pair().await;
    let delay = Duration::from_millis(60);
    proxy.set(Mode::Delay(delay)).await;
    let start = Instant::now();
    let answer = harness::http_client().post(proxy.url()).body("hello").send().await.unwrap();
    assert_eq!(answer.status(), 200);
    assert!(start.elapsed() >= delay * 2);
    eventually(SOON, "the connection to be counted", || async { (proxy.connections() == 1).then_some(()) }).await;
}
