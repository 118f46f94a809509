//! Whose turn it is: fair between clients, and with few changes of model, LoRAs and size.
//!
//! Every client has an account of the work that was done for it; the one that had least is next, with its oldest job.
//! A job like the last one (same group) goes before it if its client is not far ahead, a few times in a row at most:
//! what is loaded is used, and nobody waits for ever. Jobs that are generated at once with another are chosen and counted
//! by the same rule.

use std::collections::HashMap;

/// How far ahead, in jobs of its own size, a client may be whose job is taken because it fits.
const AHEAD: f64 = 4.0;
/// Jobs that are taken in a row because they fit.
const IN_A_ROW: u32 = 8;

/// A job that waits.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Waiting {
    pub(crate) id: String,
    pub(crate) client: String,
    /// Model, LoRAs and size.
    pub(crate) group: String,
    /// What jobs have in common that can be generated at once; `None` for one that must be alone.
    pub(crate) alike: Option<String>,
    pub(crate) images: u32,
    /// How much work it is, in any unit.
    pub(crate) cost: f64,
}

/// Jobs that wait, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Schedule {
    waiting: Vec<Waiting>,
    spent: HashMap<String, f64>,
    last: Option<String>,
    in_a_row: u32,
}

impl Schedule {
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn push(&mut self, job: Waiting) {
        // Whoever comes back after a pause has saved nothing up.
        if !self.waiting.iter().any(|w| w.client == job.client) {
            let least = self.waiting.iter().map(|w| self.spent(&w.client)).fold(f64::INFINITY, f64::min);
            let spent = self.spent.entry(job.client.clone()).or_insert(0.0);
            if least.is_finite() {
                *spent = spent.max(least);
            }
        }
        self.waiting.push(job);
    }

    /// Takes a job out that is no longer wanted.
    pub(crate) fn remove(&mut self, id: &str) -> bool {
        let before = self.waiting.len();
        self.waiting.retain(|w| w.id != id);
        self.waiting.len() < before
    }

    /// Jobs that came before this one.
    pub(crate) fn before(&self, id: &str) -> Option<usize> {
        self.waiting.iter().position(|w| w.id == id)
    }

    /// The next job.
    pub(crate) fn take(&mut self) -> Option<Waiting> {
        let fair = self.fairest()?;
        let least = self.spent(&self.waiting[fair].client);
        let fitting = self.waiting.iter().position(|w| {
            Some(&w.group) == self.last.as_ref() && self.spent(&w.client) - least <= AHEAD * w.cost
        });
        let place = match fitting {
            Some(place) if self.in_a_row < IN_A_ROW => place,
            _ => fair,
        };
        self.in_a_row = if Some(place) == fitting && place != fair { self.in_a_row + 1 } else { 0 };
        Some(self.remove_at(place))
    }

    /// A job to be generated at once with one like it, of at most so many images: whose turn it is in any case, or one
    /// that would be preferred for its group.
    pub(crate) fn take_alike(&mut self, alike: &str, most: u32) -> Option<Waiting> {
        let fair = self.fairest()?;
        let least = self.spent(&self.waiting[fair].client);
        let fits = |w: &Waiting| w.alike.as_deref() == Some(alike) && w.images <= most;
        if fits(&self.waiting[fair]) {
            return Some(self.remove_at(fair));
        }
        let near = |w: &Waiting| fits(w) && self.spent(&w.client) - least <= AHEAD * w.cost;
        let place = self.waiting.iter().position(near).filter(|_| self.in_a_row < IN_A_ROW)?;
        self.in_a_row += 1;
        Some(self.remove_at(place))
    }

    /// Takes a job out and puts it on its client's account.
    fn remove_at(&mut self, place: usize) -> Waiting {
        let job = self.waiting.remove(place);
        *self.spent.entry(job.client.clone()).or_insert(0.0) += job.cost;
        self.last = Some(job.group.clone());
        if self.waiting.is_empty() {
            self.spent.clear();
        }
        job
    }

    /// The oldest job of the client that had least.
    fn fairest(&self) -> Option<usize> {
        let mut best: Option<(f64, usize)> = None;
        for (place, job) in self.waiting.iter().enumerate() {
            let spent = self.spent(&job.client);
            if best.is_none_or(|(least, _)| spent < least) {
                best = Some((spent, place));
            }
        }
        best.map(|(_, place)| place)
    }

    fn spent(&self, client: &str) -> f64 {
        self.spent.get(client).copied().unwrap_or(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(id: &str, client: &str, group: &str) -> Waiting {
        let alike = Some(group.into());
        Waiting { id: id.into(), client: client.into(), group: group.into(), alike, images: 1, cost: 1.0 }
    }

    fn taken(schedule: &mut Schedule) -> String {
        std::iter::from_fn(|| schedule.take()).map(|w| w.id).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_client_with_many_jobs_lets_others_in_between() {
        let mut schedule = Schedule::default();
        for id in ["a1", "a2", "a3", "a4"] {
            // Groups of their own: only fairness decides.
            schedule.push(job(id, "a", id));
        }
        schedule.push(job("b1", "b", "b1"));
        schedule.push(job("b2", "b", "b2"));
        assert_eq!(taken(&mut schedule), "a1 b1 a2 b2 a3 a4");
    }

    #[test]
    fn jobs_of_one_group_run_together() {
        let mut schedule = Schedule::default();
        for (id, group) in [("1", "x"), ("2", "y"), ("3", "x"), ("4", "y"), ("5", "x")] {
            schedule.push(job(id, "a", group));
        }
        assert_eq!(taken(&mut schedule), "1 3 5 2 4");
    }

    #[test]
    fn a_group_does_not_keep_others_waiting_for_ever() {
        let mut schedule = Schedule::default();
        schedule.push(job("x", "a", "x"));
        schedule.push(job("other", "a", "y"));
        for i in 0..50 {
            schedule.push(job(&format!("x{i}"), "a", "x"));
        }
        let place = taken(&mut schedule).split(' ').position(|id| id == "other").unwrap();
        assert!(place <= 1 + IN_A_ROW as usize, "{place}");
    }

    #[test]
    fn a_client_far_ahead_is_not_preferred_for_its_group() {
        let mut schedule = Schedule::default();
        for i in 0..10 {
            schedule.push(job(&format!("a{i}"), "a", "x"));
        }
        for _ in 0..6 {
            schedule.take();
        }
        schedule.push(job("b", "b", "y"));
        schedule.spent.insert("b".into(), 0.0);
        assert_eq!(schedule.take().unwrap().id, "b");
    }

    #[test]
    fn a_pause_saves_nothing_up() {
        let mut schedule = Schedule::default();
        for i in 0..6 {
            schedule.push(job(&format!("a{i}"), "a", &format!("{i}")));
        }
        schedule.take();
        schedule.take();
        for i in 0..4 {
            schedule.push(job(&format!("b{i}"), "b", &format!("b{i}")));
        }
        let all = taken(&mut schedule);
        assert_eq!(all, "a2 b0 a3 b1 a4 b2 a5 b3");
    }

    #[test]
    fn company_is_alike_small_enough_and_not_far_ahead() {
        let mut schedule = Schedule::default();
        schedule.push(job("a1", "a", "x"));
        schedule.push(Waiting { alike: None, ..job("alone", "c", "x") });
        schedule.push(Waiting { images: 4, ..job("four", "d", "x") });
        schedule.push(job("other", "b", "y"));
        schedule.push(job("a2", "a", "x"));
        schedule.push(job("e", "e", "x"));
        assert_eq!(schedule.take().unwrap().id, "a1");
        assert_eq!(schedule.take_alike("x", 3).unwrap().id, "a2");
        schedule.spent.insert("e".into(), 50.0);
        assert_eq!(schedule.take_alike("x", 3), None);
        assert_eq!(schedule.take_alike("x", 4).unwrap().id, "four");
        assert_eq!(schedule.len(), 3);
    }

    #[test]
    fn company_does_not_keep_others_waiting_for_ever() {
        let mut schedule = Schedule::default();
        schedule.push(job("x", "a", "x"));
        schedule.push(job("other", "b", "y"));
        for i in 0..50 {
            schedule.push(job(&format!("x{i}"), &format!("c{i}"), "x"));
        }
        let mut before = 0;
        'all: loop {
            let first = schedule.take().unwrap();
            let company = std::iter::from_fn(|| schedule.take_alike(&first.group, 1)).take(3);
            for id in std::iter::once(first.id.clone()).chain(company.map(|w| w.id).collect::<Vec<_>>()) {
                match id == "other" {
                    true => break 'all,
                    false => before += 1,
                }
            }
        }
        assert!(before <= 1 + 2 * IN_A_ROW as usize, "{before}");
    }

    #[test]
    fn what_is_removed_is_not_taken() {
        let mut schedule = Schedule::default();
        schedule.push(job("1", "a", "x"));
        schedule.push(job("2", "a", "x"));
        assert_eq!(schedule.before("2"), Some(1));
        assert!(schedule.remove("1") && !schedule.remove("1"));
        assert_eq!(schedule.before("2"), Some(0));
        assert_eq!(taken(&mut schedule), "2");
    }
}
