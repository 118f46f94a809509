//! Dates and times in UTC.

use std::time::{SystemTime, UNIX_EPOCH};

const DAY: i64 = 86_400;

/// A moment, as a calendar and a clock in UTC show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Utc {
    /// The year.
    pub year: i64,
    /// The month, from 1.
    pub month: u8,
    /// The day of the month, from 1.
    pub day: u8,
    /// Hours, from 0 to 23.
    pub hour: u8,
    /// Minutes.
    pub minute: u8,
    /// Seconds.
    pub second: u8,
}

impl Utc {
    /// The present.
    pub fn now() -> Utc {
        Utc::from_seconds(unix_seconds())
    }

    /// The moment this many seconds after the start of 1970.
    pub fn from_seconds(seconds: i64) -> Utc {
        let (days, of_day) = (seconds.div_euclid(DAY), seconds.rem_euclid(DAY));
        // Years of four centuries start in March, so that the leap day is the last one.
        let days = days + 719_468;
        let (era, of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
        let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let from_march = (5 * of_year + 2) / 153;
        let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
        Utc {
            year: era * 400 + year_of_era + i64::from(month <= 2),
            month: month as u8,
            day: (of_year - (153 * from_march + 2) / 5 + 1) as u8,
            hour: (of_day / 3600) as u8,
            minute: (of_day / 60 % 60) as u8,
            second: (of_day % 60) as u8,
        }
    }

    /// Seconds since the start of 1970.
    pub fn seconds(self) -> i64 {
        let year = self.year - i64::from(self.month <= 2);
        let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
        let from_march = (i64::from(self.month) + 9) % 12;
        let of_year = (153 * from_march + 2) / 5 + i64::from(self.day) - 1;
        let days =
            era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + of_year - 719_468;
        days * DAY + i64::from(self.hour) * 3600 + i64::from(self.minute) * 60 + i64::from(self.second)
    }

    /// The date, `2026-01-31`.
    pub fn date(self) -> String {
        format!("{:04}-{:02}-{:02}", self.year, self.month, self.day)
    }

    /// Date and time, `2026-01-31T23:59:59Z`.
    pub fn rfc3339(self) -> String {
        format!("{}T{:02}:{:02}:{:02}Z", self.date(), self.hour, self.minute, self.second)
    }
}

/// Seconds since the start of 1970.
pub fn unix_seconds() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_798_675_199, "2026-12-30T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
            (-1, "1969-12-31T23:59:59Z"),
        ] {
            assert_eq!(Utc::from_seconds(seconds).rfc3339(), text);
            assert_eq!(Utc::from_seconds(seconds).seconds(), seconds);
        }
        for day in 0..200_000 {
            assert_eq!(Utc::from_seconds(day * DAY).seconds(), day * DAY);
        }
    }
}
