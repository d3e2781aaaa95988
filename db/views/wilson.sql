-- name: wilson_low, wilson_high
-- purpose: The 95% bounds of a rate of which `hits` of `of` were seen.
-- reader: whoever adds up counts of defect_rate, and defect_rate itself
-- grain: functions

-- The score interval of E. B. Wilson, "Probable inference, the law of succession, and statistical inference", 1927,
-- with z = 1.96. Unlike the textbook's p +- z * sqrt(p (1 - p) / n) it holds for rates near 0 and for small counts.
create function report.wilson_low(hits bigint, of bigint) returns double precision
language sql immutable parallel safe as $$
    select case when of > 0 then
        greatest(0, (p + z * z / (2 * n) - z * sqrt(p * (1 - p) / n + z * z / (4 * n * n))) / (1 + z * z / n)) end
    from (select hits::float8 / nullif(of, 0), nullif(of, 0)::float8, 1.96::float8) as given (p, n, z)
$$;
comment on function report.wilson_low is 'The lower 95% bound of a rate of which `hits` of `of` were seen; null of none.';

create function report.wilson_high(hits bigint, of bigint) returns double precision
language sql immutable parallel safe as $$
    select case when of > 0 then
        least(1, (p + z * z / (2 * n) + z * sqrt(p * (1 - p) / n + z * z / (4 * n * n))) / (1 + z * z / n)) end
    from (select hits::float8 / nullif(of, 0), nullif(of, 0)::float8, 1.96::float8) as given (p, n, z)
$$;
comment on function report.wilson_high is 'The upper 95% bound of a rate of which `hits` of `of` were seen; null of none.';
