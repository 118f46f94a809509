//! The order of waiting jobs: fair between clients, with few changes of model, LoRAs and size.
//!
//! Jobs of a lower priority wait while there are others. Within a priority, the queue counts the work done for each client;
//! the client with the least is next, with its oldest job. A job with the
//! same group key as the last one goes first if its client is not far ahead, but only a few times in a row: loaded models
//! are reused, and nobody starves. Jobs that join a batch are chosen and counted by the same rule.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::ops::Deref;
use std::sync::Arc;

use crate::jobs::job::Job;
use crate::jobs::priority::Priority;

/// How far ahead of the others a client may be, in jobs of its own size, for its job to be preferred.
const MAX_LEAD: f64 = 4.0;
/// How many jobs in a row may be preferred.
const MAX_PREFERRED: u32 = 8;

/// How many turns are looked ahead.
const MAX_TURNS: usize = 256;

/// A waiting job.
#[derive(Clone, Debug)]
struct Waiting {
    job: Arc<Job>,
    /// Its client chose its place: no later job of the client is preferred to it.
    ordered: bool,
}

impl Deref for Waiting {
    type Target = Job;

    fn deref(&self) -> &Job {
        &self.job
    }
}

/// The waiting jobs.
#[derive(Clone, Debug, Default)]
pub(crate) struct FairQueue {
    /// Oldest first.
    jobs: Vec<Waiting>,
    /// The ids of all jobs: most that are looked for are not here, or last.
    ids: HashSet<String>,
    /// Number of jobs of each client.
    clients: HashMap<String, usize>,
    /// Number of jobs of each priority.
    priorities: [usize; Priority::ALL.len()],
    /// Work done for each client.
    spent: HashMap<String, f64>,
    last_group: Option<String>,
    /// Preferred jobs taken in a row.
    preferred: u32,
}

impl FairQueue {
    pub(crate) fn len(&self) -> usize {
        self.jobs.len()
    }

    pub(crate) fn push(&mut self, job: Arc<Job>) {
        self.add(self.jobs.len(), job);
    }

    /// Adds a job at its place.
    pub(crate) fn insert(&mut self, job: Arc<Job>) {
        let later = self.jobs.iter().rposition(|other| other.place() <= job.place());
        self.add(later.map_or(0, |before| before + 1), job);
    }

    fn add(&mut self, index: usize, job: Arc<Job>) {
        self.give_share(&job);
        self.ids.insert(job.id.clone());
        *self.clients.entry(job.client.clone()).or_default() += 1;
        self.priorities[job.priority as usize] += 1;
        let ordered = job.fleet.rank.is_some();
        self.jobs.insert(index, Waiting { job, ordered });
    }

    fn remove_at(&mut self, index: usize) -> Arc<Job> {
        let job = self.jobs.remove(index).job;
        self.ids.remove(&job.id);
        self.priorities[job.priority as usize] -= 1;
        if let Some(count) = self.clients.get_mut(&job.client) {
            *count -= 1;
            if *count == 0 {
                self.clients.remove(&job.client);
            }
        }
        job
    }

    /// Where a job is; new ones, which are asked for most often, are last.
    fn index(&self, id: &str) -> Option<usize> {
        if self.ids.contains(id) { self.jobs.iter().rposition(|job| job.id == id) } else { None }
    }

    fn give_share(&mut self, job: &Job) {
        // A client that returns after a pause gets no credit for it.
        if !self.clients.contains_key(&job.client) {
            let least = self.clients.keys().map(|client| self.spent(client)).fold(f64::INFINITY, f64::min);
            let spent = self.spent.entry(job.client.clone()).or_insert(0.0);
            if least.is_finite() {
                *spent = spent.max(least);
            }
        }
    }

    /// Removes a job; returns whether it was there.
    pub(crate) fn remove(&mut self, id: &str) -> bool {
        self.index(id).map(|index| self.remove_at(index)).is_some()
    }

    /// Gives these jobs of one client their places in this order; other ids are ignored. Returns those that were found.
    pub(crate) fn reorder(&mut self, client: &str, order: &[String]) -> Vec<String> {
        let places: Vec<usize> = (0..self.jobs.len())
            .filter(|i| self.jobs[*i].client == client && order.contains(&self.jobs[*i].id))
            .collect();
        let mut moved: Vec<Waiting> = places.iter().map(|i| self.jobs[*i].clone()).collect();
        moved.sort_by_key(|job| order.iter().position(|id| *id == job.id));
        let ids = moved.iter().map(|job| job.id.clone()).collect();
        for (place, job) in places.into_iter().zip(moved) {
            self.jobs[place] = Waiting { ordered: true, ..job };
        }
        ids
    }

    /// Orders queues by how urgent their jobs are: by the highest priority, then by the place of the first job.
    pub(crate) fn urgency(&self) -> Option<(Reverse<Priority>, u64)> {
        let highest = Priority::ALL.into_iter().rfind(|priority| self.priorities[*priority as usize] > 0)?;
        self.jobs.first().map(|job| (Reverse(highest), job.place()))
    }

    /// The ids of all jobs in their order.
    pub(crate) fn ids(&self) -> impl Iterator<Item = &str> {
        self.jobs.iter().map(|job| job.id.as_str())
    }

    /// The number of jobs that are taken before this one, as things stand. Beyond [`MAX_TURNS`] it is at least that.
    pub(crate) fn position(&self, id: &str) -> Option<usize> {
        let index = self.index(id)?;
        let own = self.jobs[index].priority;
        let ahead = if self.priorities[own as usize] == self.jobs.len() {
            index
        } else {
            let earlier = self.jobs[..index].iter().filter(|job| job.priority >= own).count();
            earlier + self.jobs[index..].iter().filter(|job| job.priority > own).count()
        };
        if ahead >= MAX_TURNS {
            return Some(ahead);
        }
        let turn = self.turns().take(MAX_TURNS).position(|job| job.id == id);
        Some(turn.unwrap_or(ahead.max(MAX_TURNS)))
    }

    /// The work of the next `count` jobs.
    pub(crate) fn cost_of_next(&self, count: usize) -> f64 {
        self.turns().take(count.min(MAX_TURNS)).map(|job| job.cost).sum()
    }

    /// The jobs in the order in which they are taken if no other comes.
    fn turns(&self) -> impl Iterator<Item = Arc<Job>> {
        // A long queue is not copied whole: what is far behind takes no turn before long.
        let mut jobs: Vec<&Waiting> = self.jobs.iter().collect();
        jobs.sort_by_key(|job| Reverse(job.priority));
        jobs.truncate(2 * MAX_TURNS);
        let mut queue = FairQueue::default();
        for Waiting { job, ordered } in jobs {
            queue.push(Arc::clone(job));
            queue.jobs.last_mut().into_iter().for_each(|last| last.ordered = *ordered);
        }
        queue.spent.clone_from(&self.spent);
        (queue.last_group, queue.preferred) = (self.last_group.clone(), self.preferred);
        std::iter::from_fn(move || queue.take())
    }

    /// Takes the next job.
    pub(crate) fn take(&mut self) -> Option<Arc<Job>> {
        let (index, fair) = self.next(&|_| true)?;
        self.preferred = if index == fair { 0 } else { self.preferred + 1 };
        Some(self.take_at(index))
    }

    /// The id of the next job among those that `may_run` accepts.
    pub(crate) fn choose(&self, may_run: impl Fn(&Job) -> bool) -> Option<&str> {
        self.next(&may_run).map(|(index, _)| self.jobs[index].id.as_str())
    }

    /// Takes the job with this id, for this process if `own`, else for another.
    pub(crate) fn take_id(&mut self, id: &str, own: bool) -> Option<Arc<Job>> {
        let index = self.index(id)?;
        let last_group = self.last_group.clone();
        if own {
            let is_loaded = last_group.as_deref() == Some(self.jobs[index].group_key());
            self.preferred = if is_loaded { self.preferred + 1 } else { 0 };
        }
        let job = self.take_at(index);
        if !own {
            self.last_group = last_group;
        }
        Some(job)
    }

    /// The next job that `may_run` accepts, and the one whose turn it is by fairness alone.
    fn next(&self, may_run: &dyn Fn(&Job) -> bool) -> Option<(usize, usize)> {
        let fair = self.fairest(may_run)?;
        let (least, priority) = (self.spent(&self.jobs[fair].client), self.jobs[fair].priority);
        let may_go_first = |(index, job): (usize, &Waiting)| {
            let is_loaded = Some(job.group_key()) == self.last_group.as_deref();
            is_loaded
                && job.priority == priority
                && self.is_near(job, least)
                && !self.passes_ordered(index)
                && may_run(job)
        };
        let preferred = self.jobs.iter().enumerate().position(may_go_first);
        Some((preferred.filter(|_| self.preferred < MAX_PREFERRED).unwrap_or(fair), fair))
    }

    /// Takes a job with this batch key and at most `max_images` images: the next job by fairness if it fits, else one
    /// that may be preferred.
    pub(crate) fn take_batchable(&mut self, batch_key: &str, max_images: u32) -> Option<Arc<Job>> {
        let fair = self.fairest(&|_| true)?;
        let (least, priority) = (self.spent(&self.jobs[fair].client), self.jobs[fair].priority);
        let fits = |job: &Job| {
            job.batch_key() == Some(batch_key) && job.images() <= max_images && job.priority == priority
        };
        if fits(&self.jobs[fair]) {
            return Some(self.take_at(fair));
        }
        let preferred = self.jobs.iter().position(|job| fits(job) && self.is_near(job, least));
        let index = preferred.filter(|_| self.preferred < MAX_PREFERRED)?;
        self.preferred += 1;
        Some(self.take_at(index))
    }

    /// Removes a job and counts its work for its client.
    fn take_at(&mut self, index: usize) -> Arc<Job> {
        let job = self.remove_at(index);
        *self.spent.entry(job.client.clone()).or_insert(0.0) += job.cost;
        self.last_group = Some(job.group_key().to_owned());
        if self.jobs.is_empty() {
            self.spent.clear();
        }
        job
    }

    /// Whether an earlier job of the same client was given its place by the client.
    fn passes_ordered(&self, index: usize) -> bool {
        self.jobs[..index].iter().any(|job| job.ordered && job.client == self.jobs[index].client)
    }

    /// Whether a job's client is close enough to the one with the least work for the job to be preferred.
    fn is_near(&self, job: &Job, least: f64) -> bool {
        self.spent(&job.client) - least <= MAX_LEAD * job.cost
    }

    /// The oldest job of the client with the least work, among those of the highest priority that `may_run` accepts.
    fn fairest(&self, may_run: &dyn Fn(&Job) -> bool) -> Option<usize> {
        let mut best: Option<(Priority, f64, usize)> = None;
        for (index, job) in self.jobs.iter().enumerate().filter(|(_, job)| may_run(job)) {
            let spent = self.spent(&job.client);
            let is_better =
                |(highest, least, _)| job.priority > highest || (job.priority == highest && spent < least);
            if best.is_none_or(is_better) {
                best = Some((job.priority, spent, index));
            }
        }
        best.map(|(_, _, index)| index)
    }

    fn spent(&self, client: &str) -> f64 {
        self.spent.get(client).copied().unwrap_or(0.0)
    }
}

#[cfg(test)]
mod tests {
    use kiln_engine::Request;

    use super::*;

    /// A job of one image; jobs of a group can share a batch.
    fn job(id: &str, client: &str, group: &str) -> Arc<Job> {
        job_with(id, client, group, 1, Priority::Normal)
    }

    fn job_with(id: &str, client: &str, group: &str, images: u32, priority: Priority) -> Arc<Job> {
        let request = Request {
            prompts: vec!["a".into()],
            model: Some(group.into()),
            n: Some(images),
            ..Request::default()
        };
        let (id, client) = (id.into(), client.into());
        Arc::new(Job { id, client, request, priority, cost: 1.0, ..Job::default() })
    }

    /// The batch key of a group's jobs.
    fn batch(group: &str) -> String {
        job("", "", group).batch_key().unwrap().to_owned()
    }

    fn take_all(queue: &mut FairQueue) -> String {
        std::iter::from_fn(|| queue.take()).map(|job| job.id.clone()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn clients_take_turns() {
        let mut queue = FairQueue::default();
        for id in ["a1", "a2", "a3", "a4"] {
            // Every job has its own group: only fairness decides.
            queue.push(job(id, "a", id));
        }
        queue.push(job("b1", "b", "b1"));
        queue.push(job("b2", "b", "b2"));
        assert_eq!(take_all(&mut queue), "a1 b1 a2 b2 a3 a4");
    }

    #[test]
    fn a_higher_priority_goes_first_and_is_fair_within_itself() {
        let mut queue = FairQueue::default();
        let with = |priority, id: &str, client: &str| job_with(id, client, "x", 1, priority);
        queue.push(with(Priority::Low, "l", "a"));
        queue.push(with(Priority::Normal, "n1", "a"));
        queue.push(with(Priority::Normal, "n2", "a"));
        queue.push(with(Priority::Normal, "n3", "b"));
        queue.push(with(Priority::High, "h", "b"));
        let positions: Vec<_> = ["l", "n1", "n2", "n3", "h"].map(|id| queue.position(id).unwrap()).into();
        assert_eq!(positions, [4, 1, 2, 3, 0]);
        // A batch of the highest priority is not filled up with others.
        assert_eq!(queue.take().unwrap().id, "h");
        assert_eq!(queue.take_batchable(&batch("x"), 1).unwrap().priority, Priority::Normal);
        assert_eq!(take_all(&mut queue), "n2 n3 l");
    }

    #[test]
    fn jobs_of_one_group_run_together() {
        let mut queue = FairQueue::default();
        for (id, group) in [("1", "x"), ("2", "y"), ("3", "x"), ("4", "y"), ("5", "x")] {
            queue.push(job(id, "a", group));
        }
        assert_eq!(take_all(&mut queue), "1 3 5 2 4");
    }

    #[test]
    fn a_group_does_not_starve_others() {
        let mut queue = FairQueue::default();
        queue.push(job("x", "a", "x"));
        queue.push(job("other", "a", "y"));
        for i in 0..50 {
            queue.push(job(&format!("x{i}"), "a", "x"));
        }
        let index = take_all(&mut queue).split(' ').position(|id| id == "other").unwrap();
        assert!(index <= 1 + MAX_PREFERRED as usize, "{index}");
    }

    #[test]
    fn a_client_far_ahead_is_not_preferred_for_its_group() {
        let mut queue = FairQueue::default();
        for i in 0..10 {
            queue.push(job(&format!("a{i}"), "a", "x"));
        }
        for _ in 0..6 {
            queue.take();
        }
        queue.push(job("b", "b", "y"));
        queue.spent.insert("b".into(), 0.0);
        assert_eq!(queue.take().unwrap().id, "b");
    }

    #[test]
    fn a_pause_gives_no_credit() {
        let mut queue = FairQueue::default();
        for i in 0..6 {
            queue.push(job(&format!("a{i}"), "a", &format!("{i}")));
        }
        queue.take();
        queue.take();
        for i in 0..4 {
            queue.push(job(&format!("b{i}"), "b", &format!("b{i}")));
        }
        assert_eq!(take_all(&mut queue), "a2 b0 a3 b1 a4 b2 a5 b3");
    }

    #[test]
    fn batchable_jobs_have_the_key_fit_the_batch_and_are_not_far_ahead() {
        let mut queue = FairQueue::default();
        queue.push(job("a1", "a", "x"));
        queue.push(Arc::new(Job { run_alone: true, ..Job::clone(&job("alone", "c", "x")) }));
        queue.push(job_with("four", "d", "x", 4, Priority::Normal));
        queue.push(job("other", "b", "y"));
        queue.push(job("a2", "a", "x"));
        queue.push(job("e", "e", "x"));
        assert_eq!(queue.take().unwrap().id, "a1");
        assert_eq!(queue.take_batchable(&batch("x"), 3).unwrap().id, "a2");
        queue.spent.insert("e".into(), 50.0);
        assert!(queue.take_batchable(&batch("x"), 3).is_none());
        assert_eq!(queue.take_batchable(&batch("x"), 4).unwrap().id, "four");
        assert_eq!(queue.len(), 3);
    }

    #[test]
    fn batching_does_not_starve_others() {
        let mut queue = FairQueue::default();
        queue.push(job("x", "a", "x"));
        queue.push(job("other", "b", "y"));
        for i in 0..50 {
            queue.push(job(&format!("x{i}"), &format!("c{i}"), "x"));
        }
        let mut before = 0;
        'all: loop {
            let first = queue.take().unwrap();
            let joining: Vec<_> =
                std::iter::from_fn(|| queue.take_batchable(first.batch_key().unwrap(), 1)).take(3).collect();
            for job in std::iter::once(first).chain(joining) {
                if job.id == "other" {
                    break 'all;
                }
                before += 1;
            }
        }
        assert!(before <= 1 + 2 * MAX_PREFERRED as usize, "{before}");
    }

    #[test]
    fn a_position_is_the_turn() {
        let mut queue = FairQueue::default();
        for id in ["a1", "a2", "a3"] {
            queue.push(Arc::new(Job { cost: 10.0, ..Job::clone(&job(id, "a", id)) }));
        }
        queue.push(job("b1", "b", "b1"));
        let positions: Vec<_> = ["a1", "a2", "a3", "b1"].map(|id| queue.position(id).unwrap()).into();
        assert_eq!((positions, queue.cost_of_next(2)), (vec![0, 2, 3, 1], 11.0));
        assert_eq!(take_all(&mut queue), "a1 b1 a2 a3");
    }

    #[test]
    fn a_removed_job_is_not_taken() {
        let mut queue = FairQueue::default();
        queue.push(job("1", "a", "x"));
        queue.push(job("2", "a", "x"));
        assert_eq!(queue.position("2"), Some(1));
        assert!(queue.remove("1") && !queue.remove("1"));
        assert_eq!(queue.position("2"), Some(0));
        assert_eq!(take_all(&mut queue), "2");
    }

    #[test]
    fn a_client_orders_its_own_jobs_even_against_loaded_models() {
        let mut queue = FairQueue::default();
        for (id, client, group) in
            [("a0", "a", "x"), ("a1", "a", "x"), ("b1", "b", "x"), ("a2", "a", "y"), ("a3", "a", "x")]
        {
            queue.push(job(id, client, group));
        }
        assert_eq!(queue.take().unwrap().id, "a0");
        let order = ["a2", "b1", "none", "a3", "a1"].map(str::to_owned);
        assert_eq!(queue.reorder("a", &order), ["a2", "a3", "a1"]);
        assert_eq!(queue.ids().collect::<Vec<_>>(), ["a2", "b1", "a3", "a1"]);
        assert_eq!(take_all(&mut queue), "b1 a2 a3 a1");
    }
}
