"""Model factories that come with DMSC. Users' own live anywhere: `module:factory` in the job file."""
