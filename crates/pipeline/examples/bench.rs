//! ad hoc
use pipeline::queue::sqlite::SqliteQueue;
use pipeline::sqlite::Database;
use pipeline::*;
use std::sync::Arc;
use std::sync::atomic::*;
use std::time::{Duration, Instant};

struct H(AtomicU64, u64, CancellationToken);
#[async_trait::async_trait]
impl Handler for H {
    async fn handle(&self, _m: &Message) -> Outcome {
        if self.0.fetch_add(1, Ordering::Relaxed) + 1 == self.1 { self.2.cancel(); }
        Outcome::Done
    }
}

#[tokio::main]
async fn main() {
    let dir = tempfile::tempdir_in("/work").unwrap();
    let db = Database::open(&dir.path().join("b.db")).unwrap();
    let q = SqliteQueue::open(&db, "q", QueueOptions::default()).await.unwrap();
    let body = vec![b'x'; 400];
    for senders in [1usize, 64, 256, 1000] {
        let n = if senders == 1 { 2000 } else { 200_000 };
        let c0 = db.commits();
        let t = Instant::now();
        let mut set = tokio::task::JoinSet::new();
        for _ in 0..senders {
            let (q, body) = (q.clone(), body.clone());
            set.spawn(async move { for _ in 0..n / senders { q.send(&[Outgoing::new(body.clone())]).await.remove(0).unwrap(); } });
        }
        while set.join_next().await.is_some() {}
        let e = t.elapsed();
        println!("send {senders} senders: {:.0}/s, {} commits", (n / senders * senders) as f64 / e.as_secs_f64(), db.commits() - c0);
    }
    println!("{:?}", q.depth().await.unwrap());
    let t = Instant::now();
    let mut got = 0;
    while got < 50_000 {
        let m = q.receive(64, Duration::ZERO).await.unwrap();
        got += m.len();
        let r: Vec<_> = m.into_iter().map(|m| m.receipt).collect();
        q.ack(&r).await;
    }
    println!("receive(64)+ack serial: {:.0}/s", got as f64 / t.elapsed().as_secs_f64());
    for conc in [64usize, 256] {
        let n = 150_000;
        let token = CancellationToken::new();
        let t = Instant::now();
        let c0 = db.commits();
        let s = Pipeline::new(Arc::new(q.clone()), PipelineOptions { concurrency: conc, receive_max: conc, ..Default::default() })
            .run(Arc::new(H(AtomicU64::new(0), n, token.clone())), token).await;
        println!("pipeline {conc}: {:.0}/s {:?} commits {}", s.done as f64 / t.elapsed().as_secs_f64(), s, db.commits() - c0);
    }
    // take cost at depth
    for depth in [1_000usize, 1_000_000] {
        let q = SqliteQueue::open(&db, &format!("d{depth}"), QueueOptions::default()).await.unwrap();
        let t = Instant::now();
        for _ in 0..depth / 1000 {
            let ms: Vec<_> = (0..1000).map(|_| Outgoing::new(body.clone())).collect();
            q.send(&ms).await;
        }
        println!("fill {depth}: {:.0}/s", depth as f64 / t.elapsed().as_secs_f64());
        let mut times = vec![]; let mut acks = vec![];
        for _ in 0..90 {
            let t = Instant::now();
            let m = q.receive(10, Duration::ZERO).await.unwrap();
            times.push(t.elapsed());
            assert_eq!(m.len(), 10);
            let r: Vec<_> = m.into_iter().map(|m| m.receipt).collect();
            let t = Instant::now();
            q.ack(&r).await;
            acks.push(t.elapsed());
        }
        times.sort(); acks.sort();
        let (q2, mut cost) = (q.clone(), vec![]);
        let _ = &q2;
        let t = Instant::now();
        let d = q.depth().await.unwrap();
        cost.push(t.elapsed());
        println!("depth {depth}: receive(10) p50 {:?} p99 {:?}; ack(10) p50 {:?}; depth() {:?} {:?}", times[45], times[88], acks[45], cost[0], d);
    }
    // data_version
    let c = rusqlite::Connection::open(db.path()).unwrap();
    let mut st = c.prepare("PRAGMA data_version").unwrap();
    let t = Instant::now();
    for _ in 0..100_000 { let _: i64 = st.query_row([], |r| r.get(0)).unwrap(); }
    println!("data_version {:?}", t.elapsed() / 100_000);
    let wal = std::fs::metadata(format!("{}-wal", db.path().display())).unwrap().len();
    println!("wal {} MiB", wal >> 20);
    let _ = AtomicBool::new(true);
}
