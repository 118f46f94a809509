//! The open connections: how many there may be in all and from one address, and which one goes when there is no room.
//!
//! A connection without a request in progress is idle. A new connection that finds no room closes the one that has been
//! idle for longest, of the address with the most connections. If none is idle, the new one gets a place in a small
//! reserve that answers health checks alone.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use kiln_base::lock;
use tokio::sync::Notify;

/// Connections beyond the limit, for health checks.
const RESERVE: usize = 16;

/// All open connections.
pub(crate) struct Connections {
    max: usize,
    max_per_address: usize,
    open: Mutex<Open>,
    closed: Notify,
}

#[derive(Default)]
struct Open {
    next_id: u64,
    entries: HashMap<u64, Entry>,
}

struct Entry {
    address: IpAddr,
    reserve: bool,
    idle_since: Option<Instant>,
    /// Requests in progress.
    requests: usize,
    /// Requests so far.
    started: u64,
    evicted: Arc<Notify>,
    /// Responses whose last bytes the client has not taken, by number, and since when.
    unread: HashMap<u64, Instant>,
}

impl Open {
    fn count(&self, include: impl Fn(&Entry) -> bool) -> usize {
        self.entries.values().filter(|entry| include(entry)).count()
    }

    /// Closes an idle connection among those that `include` accepts; returns whether there was one.
    fn evict(&mut self, include: impl Fn(&Entry) -> bool) -> bool {
        let mut by_address: HashMap<IpAddr, usize> = HashMap::new();
        for entry in self.entries.values() {
            *by_address.entry(entry.address).or_default() += 1;
        }
        let idle = self.entries.iter().filter(|(_, entry)| include(entry));
        let idle = idle.filter_map(|(id, entry)| Some((*id, by_address[&entry.address], entry.idle_since?)));
        let Some((id, ..)) = idle.max_by_key(|(_, of_address, since)| (*of_address, Reverse(*since))) else {
            return false;
        };
        self.entries.remove(&id).is_some_and(|entry| {
            entry.evicted.notify_one();
            true
        })
    }
}

impl Connections {
    pub(crate) fn new(max: usize, max_per_address: usize) -> Arc<Connections> {
        Arc::new(Connections { max, max_per_address, open: Mutex::default(), closed: Notify::new() })
    }

    /// Admits a connection; `None` if even the reserve is full. The limit by address does not apply to a proxy.
    pub(crate) fn admit(self: &Arc<Connections>, address: IpAddr, proxy: bool) -> Option<Arc<Connection>> {
        let address = network(address);
        let mut open = lock(&self.open);
        let of_address = |entry: &Entry| entry.address == address && !entry.reserve;
        let mut room = true;
        if !proxy && open.count(of_address) >= self.max_per_address {
            room = open.evict(of_address);
        }
        if room && open.count(|entry| !entry.reserve) >= self.max {
            room = open.evict(|entry| !entry.reserve);
        }
        if !room && open.count(|entry| entry.reserve) >= RESERVE && !open.evict(|entry| entry.reserve) {
            return None;
        }
        let id = open.next_id;
        open.next_id += 1;
        let evicted = Arc::new(Notify::new());
        let entry = Entry {
            address,
            reserve: !room,
            idle_since: Some(Instant::now()),
            requests: 0,
            started: 0,
            evicted: Arc::clone(&evicted),
            unread: HashMap::new(),
        };
        open.entries.insert(id, entry);
        Some(Arc::new(Connection { all: Arc::clone(self), id, evicted, is_reserve: !room }))
    }

    /// Waits until every connection is closed.
    pub(crate) async fn wait_until_closed(&self) {
        loop {
            let closed = self.closed.notified();
            let mut closed = std::pin::pin!(closed);
            closed.as_mut().enable();
            if lock(&self.open).entries.is_empty() {
                return;
            }
            closed.await;
        }
    }
}

/// The part of an address that one client owns: an IPv4 address, or an IPv6 network of 64 bits.
pub(crate) fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => IpAddr::V4(address),
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
        }
    }
}

/// One open connection; dropping it frees its place.
pub(crate) struct Connection {
    all: Arc<Connections>,
    id: u64,
    evicted: Arc<Notify>,
    /// It has a place in the reserve: only health checks are answered.
    pub(crate) is_reserve: bool,
}

impl Connection {
    fn with<T>(&self, change: impl FnOnce(&mut Entry) -> T) -> Option<T> {
        lock(&self.all.open).entries.get_mut(&self.id).map(change)
    }

    /// Waits until the connection must be closed: its place goes to another one, no request comes for `idle`, or the
    /// client does not read a response for `unread`.
    pub(crate) async fn must_close(&self, idle: Duration, unread: Duration) {
        loop {
            let left = self.with(|entry| {
                let idle = entry.idle_since.map(|since| idle.saturating_sub(since.elapsed()));
                let unread = entry.unread.values().map(|since| unread.saturating_sub(since.elapsed()));
                unread.chain(idle).min()
            });
            let wait = match left {
                None | Some(Some(Duration::ZERO)) => return,
                // The state changes while this sleeps: look again soon.
                Some(left) => left.unwrap_or(idle).min(idle).min(unread),
            };
            tokio::select! {
                () = self.evicted.notified() => return,
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    /// The client took some bytes: it is not idle.
    pub(crate) fn wrote(&self) {
        self.with(|entry| entry.idle_since = entry.idle_since.map(|_| Instant::now()));
    }

    /// A request begins; it is in progress until the guard is dropped.
    pub(crate) fn begin_request(self: &Arc<Connection>) -> RequestGuard {
        let number = self.with(|entry| {
            entry.requests += 1;
            entry.idle_since = None;
            entry.started += 1;
            entry.started
        });
        RequestGuard { connection: Arc::clone(self), number: number.unwrap_or(0) }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        lock(&self.all.open).entries.remove(&self.id);
        self.all.closed.notify_waiters();
    }
}

/// A request in progress.
pub(crate) struct RequestGuard {
    connection: Arc<Connection>,
    number: u64,
}

impl RequestGuard {
    /// Keeps the request in progress until its response is sent, in parts of at most `part` bytes.
    pub(crate) fn until_sent(self, response: Response, part: usize) -> Response {
        response.map(|body| Body::new(TrackedBody { body, rest: Bytes::new(), part, guard: self }))
    }

    fn set_unread(&self, unread: bool) {
        self.connection.with(|entry| {
            if unread {
                entry.unread.insert(self.number, Instant::now());
            } else {
                entry.unread.remove(&self.number);
            }
        });
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.connection.with(|entry| {
            entry.unread.remove(&self.number);
            entry.requests -= entry.requests.min(1);
            if entry.requests == 0 {
                entry.idle_since = Some(Instant::now());
            }
        });
    }
}

/// A response's body that knows whether the client reads it: who reads asks for the next part.
struct TrackedBody {
    body: Body,
    /// What is left of the last part that was too long.
    rest: Bytes,
    part: usize,
    guard: RequestGuard,
}

impl TrackedBody {
    fn next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.rest.is_empty() {
            match Pin::new(&mut self.body).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => self.rest = data,
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                other => return other,
            }
        }
        let length = self.rest.len().min(self.part);
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(length)))))
    }
}

impl HttpBody for TrackedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let next = self.next(context);
        self.guard.set_unread(matches!(next, Poll::Ready(Some(Ok(_)))));
        next
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (body, rest) = (self.body.size_hint(), self.rest.len() as u64);
        let mut hint = SizeHint::new();
        hint.set_lower(body.lower() + rest);
        if let Some(upper) = body.upper() {
            hint.set_upper(upper + rest);
        }
        hint
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    fn is_open(connection: &Connection) -> bool {
        connection.with(|_| ()).is_some()
    }

    #[test]
    fn the_longest_idle_connection_of_the_busiest_address_makes_room() {
        let all = Connections::new(4, 3);
        let polite = all.admit(address(1), false).unwrap();
        let greedy: Vec<_> = (0..3).map(|_| all.admit(address(2), false).unwrap()).collect();
        let _request = greedy[0].begin_request();
        let new = all.admit(address(3), false).unwrap();
        assert!(!new.is_reserve && is_open(&polite) && is_open(&greedy[0]) && is_open(&greedy[2]));
        assert!(!is_open(&greedy[1]), "the oldest one that is idle");
    }

    #[test]
    fn an_address_has_its_own_limit_and_a_proxy_has_not() {
        let all = Connections::new(100, 2);
        let first = all.admit(address(1), false).unwrap();
        let second = all.admit(address(1), false).unwrap();
        let third = all.admit(address(1), false).unwrap();
        assert!(!is_open(&first) && is_open(&second) && is_open(&third));
        let proxied: Vec<_> = (0..5).map(|_| all.admit(address(9), true).unwrap()).collect();
        assert!(proxied.iter().all(|connection| is_open(connection) && !connection.is_reserve));
    }

    #[test]
    fn with_no_idle_connection_only_the_reserve_is_left() {
        let all = Connections::new(2, 2);
        let busy: Vec<_> = (0..2).map(|n| all.admit(address(n), false).unwrap()).collect();
        let requests: Vec<_> = busy.iter().map(|connection| connection.begin_request()).collect();
        let reserve: Vec<_> = (0..RESERVE).map(|_| all.admit(address(7), false).unwrap()).collect();
        assert!(reserve.iter().all(|connection| connection.is_reserve && is_open(connection)));
        // An idle one of the reserve makes room for the next; busy ones stay.
        assert!(all.admit(address(8), false).unwrap().is_reserve && !is_open(&reserve[0]));
        let health: Vec<_> = reserve.iter().map(|connection| connection.begin_request()).collect();
        let last = all.admit(address(8), false).unwrap();
        let _request = last.begin_request();
        assert!(all.admit(address(8), false).is_none());
        drop((requests, health));
        assert!(!all.admit(address(8), false).unwrap().is_reserve);
    }

    #[test]
    fn an_ipv6_client_is_its_network() {
        let network = |text: &str| super::network(text.parse().unwrap());
        assert_eq!(network("2001:db8:1:2:aaaa::1"), network("2001:db8:1:2:bbbb::9"));
        assert_ne!(network("2001:db8:1:2::1"), network("2001:db8:1:3::1"));
        assert_eq!(network("::ffff:10.0.0.1"), address(1));
    }

    #[tokio::test]
    async fn a_connection_without_requests_must_close_and_one_with_a_request_must_not() {
        let all = Connections::new(4, 4);
        let connection = all.admit(address(1), false).unwrap();
        let (short, long) = (Duration::from_millis(20), Duration::from_secs(60));
        tokio::time::timeout(long, connection.must_close(short, long)).await.unwrap();
        let request = connection.begin_request();
        let waiting = tokio::time::timeout(5 * short, connection.must_close(short, short)).await;
        assert!(waiting.is_err(), "a request is in progress");
        request.set_unread(true);
        tokio::time::timeout(long, connection.must_close(long, short)).await.unwrap();
    }
}
