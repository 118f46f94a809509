//! Whether a gateway's replica and queue can be written, and the metrics of the fleet.

use std::sync::Arc;

use super::link::Link;
use super::replica::Replica;
use crate::jobs::health::Health;
use crate::jobs::job::JobState;
use crate::jobs::metrics_text::MetricsText;
use crate::jobs::store::{Store, StoreError, now};

/// Whether a gateway can do its work.
pub(super) struct GatewayHealth {
    link: Arc<Link>,
    replica: Arc<Replica>,
    store: Arc<Store>,
}

impl GatewayHealth {
    pub(super) fn new(link: &Arc<Link>, replica: &Arc<Replica>, store: &Arc<Store>) -> GatewayHealth {
        GatewayHealth { link: Arc::clone(link), replica: Arc::clone(replica), store: Arc::clone(store) }
    }
}

impl Health for GatewayHealth {
    fn check(&self) -> Result<(), StoreError> {
        self.store.check()?;
        Ok(self.link.check()?)
    }

    fn metrics(&self, out: &mut MetricsText) {
        let (in_flight, oldest) = {
            let state = self.replica.state();
            let running = state.jobs.values().filter(|job| job.record.state == JobState::Running).count();
            let queued = state.jobs.values().filter(|job| job.record.state == JobState::Queued);
            (running, queued.map(|job| job.record.created).min())
        };
        let nodes = self.replica.nodes();
        let workers = nodes.iter().filter(|node| node.worker);
        let (count, busy) =
            workers.fold((0, 0.0), |(count, busy), node| (count + 1, busy + f64::from(node.busy)));
        let dead = self.link.wait(self.link.dead.get_info());
        let age = oldest.map_or(0.0, |created| (now() - created).max(0) as f64 / 1000.0);
        out.gauge("kiln_queue_age_seconds", "Age of the oldest queued job.", age);
        out.gauge("kiln_jobs_in_flight", "Claimed jobs.", in_flight);
        out.gauge("kiln_workers", "Live workers.", count);
        out.gauge("kiln_utilisation", "Share of the workers that generate.", busy / f64::from(count.max(1)));
        if let Ok(dead) = dead {
            out.gauge("kiln_dead_letters", "Dead letters.", dead.state.messages);
        }
    }
}
